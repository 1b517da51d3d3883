"""Branch attention: exact, linear in memory, cheap to spread over ranks, and what the learner gains by it.

``python -m benchmarks.branch_attention --json`` prints progress on standard error and one JSON object as the last line of
standard output. Correctness comes first: gradients against autograd through dense scores in fp64, counted bytes against the
formulas, and the learner's gradients against those of the plain way that it is compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention import context_parallel, memory, model, parity
from benchmarks.ranks import on_ranks
from vllm_specdraft.console import Console
from vllm_specdraft.demo.record import RunRecord
from vllm_specdraft.demo.run import EXIT_FAILED, EXIT_INTERRUPTED, one_line

TOKENS = (4096, 16384, 65536)
ANSWER_TOKENS, HELD_OUT = 96, 8
LARGEST_DIFFERENCE = 1e-3
"""Between the gradients of two ways to train, fp32: a wrong label or mask is off by more than 1e-1."""
LEAST_COSINE = 0.999
"""Of a gradient whose products were taken in a narrower dtype with the one in fp32."""


def attention(say: Any) -> dict[str, Any]:
    """Error and memory of the operator itself."""
    error = parity.largest_error()
    say(f"gradients, fp64, against dense autograd: off by {error:.1e} at most")
    peaks = {tokens: memory.peak_bytes(tokens) for tokens in TOKENS}
    for tokens, peak in peaks.items():
        dense_mb = memory.dense_bytes(tokens) / 1e6
        say(f"{tokens:6d} tokens: peak {peak / 1e6:7.0f} MB, one dense score matrix {dense_mb:8.0f} MB")
    ratios = {str(tokens): round(peak / memory.dense_bytes(tokens), 5) for tokens, peak in peaks.items()}
    return {"grad_rel_err_fp64": error, "peak_bytes_vs_dense": ratios}


def spread(say: Any) -> dict[str, Any]:
    """Bytes and overlap of context parallelism over gloo processes."""
    matches, ratio = True, 1.0
    for ranks in (2, 4):
        for found in on_ranks(context_parallel.counted, ranks):
            for form, sent in found.items():
                formula = context_parallel.expected(form, ranks)
                matches = matches and abs(sent / formula - 1) <= 0.01
            ratio = found["gather"] / found["ring"]
        sent_mb = {form: sent / 1e6 for form, sent in found.items()}
        say(f"{ranks} ranks, fp32, 3 passes: ring sends {sent_mb['ring']:.2f} MB per rank, gather {sent_mb['gather']:.2f} MB")
    overlap = min(on_ranks(context_parallel.hidden_share, 2))
    say(f"hops hidden behind computation, ring of 2 on a slow link: {overlap:.2f}")
    return {"traffic_matches_formula": matches, "traffic_vs_ring_per_pass": round(ratio, 4), "overlap": round(overlap, 3)}


def learning(say: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The engine's learner against the plain way, in interleaved rounds."""
    from benchmarks.attention.learners import PARTS, Learners, Speeds
    from trainer_bridge.draft import checkpoint, products, registry
    from vllm_specdraft import drafts, embedded
    from vllm_specdraft.demo.prompts import PromptSource

    target = options.target or embedded.ensure()
    with tempfile.TemporaryDirectory() as folder:
        draft = drafts.init(target, Path(folder) / "draft")
        draft_config = checkpoint.read_config(draft)
        layers = registry.of_config(draft_config).tap_layers(draft_config)
        prompts = [prompt.question for prompt in PromptSource(evaluation=0, seed=5).take(options.samples + HELD_OUT)]
        say(f"{len(prompts)} answers of the target ...")
        samples = drafts.self_generated(target, layers, prompts, answer_tokens=ANSWER_TOKENS)
        learners = Learners(target, draft, samples, held_out=HELD_OUT)
        difference = learners.largest_difference()
        if not difference < LARGEST_DIFFERENCE:
            raise RuntimeError(f"the learner's gradients differ from the plain way's by {difference:.1e}: not the same objective")
        say(f"gradients of the learner and of the plain way differ by {difference:.1e}")
        narrow = products.fastest()
        if narrow is not None:
            cosine = learners.least_cosine(narrow)
            say(f"products in {narrow}, as this processor takes them fastest: gradients' cosine with fp32 {cosine:.5f} at least")
            if not cosine > LEAST_COSINE:
                raise RuntimeError(f"gradients in {narrow} point elsewhere than in fp32: their cosine is {cosine:.5f}")
        speeds = Speeds()
        for _ in range(options.rounds):
            speeds.padded.append(learners.padded_tokens_per_s())
            speeds.learner.append(learners.learner_tokens_per_s())
            speeds.fp32.append(learners.learner_tokens_per_s(learn_dtype="float32"))
            speeds.sampled.append(learners.learner_tokens_per_s(deep_anchor_share=0.25))
            say(
                f"tokens/s: plain {speeds.padded[-1]:.0f}, learner {speeds.learner[-1]:.0f} (all in fp32 {speeds.fp32[-1]:.0f}), "
                f"25% of the anchors {speeds.sampled[-1]:.0f}"
            )
        for name, gain in learners.gains().items():
            say(f"{name}: {gain:.2f} times as many tokens per second, alone and in fp32")
        say(f"learner, all in fp32, against the plain way: {speeds.ratio('fp32', 'padded'):.3f}")
        for name, settings in (("as it is", {}), ("all in fp32", {"learn_dtype": "float32"}), ("25%", {"deep_anchor_share": 0.25})):
            reached = learners.accepted_after(options.learn_s, **settings)
            say(f"accepted length after {options.learn_s:g} s of learning, {name}: {reached:.3f}")
        for part in PARTS:
            reached = learners.accepted_after_without(part, options.learn_s)
            say(f"accepted length after {options.learn_s:g} s of learning, without {part}: {reached:.3f}")
        say(f"accepted length after {options.learn_s:g} s of the plain way: {learners.accepted_after_padded(options.learn_s):.3f}")
    return {
        "learner_vs_naive": round(speeds.ratio("learner", "padded"), 3),
        "sampled_anchor_speedup": round(speeds.ratio("sampled", "learner"), 3),
    }


def parser() -> argparse.ArgumentParser:
    """The benchmark's options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.branch_attention", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--json", action="store_true", help="one line of JSON (default: the same, indented)")
    made.add_argument("--rounds", type=int, default=3, metavar="N", help="interleaved rounds of the learners (default %(default)s)")
    made.add_argument("--samples", type=int, default=24, metavar="N", help="answers to train on (default %(default)s)")
    made.add_argument(
        "--learn-s", type=float, default=60.0, metavar="S", help="learning before acceptance is measured (default 60)"
    )
    made.add_argument("--target", type=Path, metavar="DIR", help="Hugging Face directory in fp32 (default: the embedded model)")
    made.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where runs go (default %(default)s/)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 after an error, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options_parser = parser()
    options = options_parser.parse_args(arguments)
    if options.rounds < 1 or options.samples < 8 or options.learn_s <= 0:
        options_parser.error("--rounds must be at least 1, --samples at least 8, --learn-s above 0")
    console = Console(sys.stderr)
    try:
        config = {key: value for key, value in vars(options).items() if key not in ("json", "out", "target")}
        record = RunRecord(options.out, command=["python", "-m", "benchmarks.branch_attention", *arguments], config=config)
        console.line(f"Branch attention, {record.machine_line}")
        result = attention(console.line) | spread(console.line) | learning(console.line, options)
        model.plot(record.directory / "context_parallel.png")
        record.add(results=result, cost_model=model.table())
        record.finish("complete")
        console.line(f"run.json and context_parallel.png are in {record.directory}")
    except KeyboardInterrupt:
        console.line("stopped")
        return EXIT_INTERRUPTED
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        console.line(f"error: {one_line(error)}")
        return EXIT_FAILED
    print(json.dumps(result, indent=None if options.json else 1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
