"""Peak memory of branch attention, forward and backward, in a process of its own for each length."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

HEADS, KV_HEADS, SIZE, PASSES = 2, 1, 32, 2


def peak_bytes(tokens: int) -> int:
    """What one pass over `tokens` tokens needs beyond the interpreter, inputs and gradients included."""
    done = subprocess.run([sys.executable, "-m", __name__, str(tokens)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"branch attention of {tokens} tokens failed: {done.stderr.strip().splitlines()[-1:]}")
    return int(json.loads(done.stdout.splitlines()[-1]))


def dense_bytes(tokens: int) -> int:
    """One fp32 score matrix of all heads: the least that a dense implementation holds."""
    return 4 * HEADS * tokens * tokens


def _measure(tokens: int) -> int:
    import torch
    from specdraft_kernels.branch_attention import branch_attention

    def run(rows: int) -> None:
        shapes = [(rows, HEADS, SIZE), *[(rows, KV_HEADS, SIZE)] * 2, *[(rows, PASSES, KV_HEADS, SIZE)] * 2]
        leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
        branch_attention(*leaves, torch.tensor([0, rows]))[0].sum().backward()

    # What the first call loads is not the operator's.
    run(64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(tokens)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
