"""Peak memory of branch attention, forward and backward, in a process of its own for each length."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_RESET_PEAK = "5"
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

    # What the first call loads is not the operator's, nor is the peak of loading it.
    run(64)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    run(tokens)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    """A line of this process's status, in bytes: ``VmRSS``, resident now, or ``VmHWM``, the most that was."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
