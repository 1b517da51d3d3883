"""Plain text tables with aligned columns: the live one, a row per round, and the comparison at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specdraft.demo.compare import FIRST, LIVE, NONE, ArmSummary
from vllm_specdraft.demo.rhythm import Burst

_ROUND_COLUMNS = (
    ("round", 5),
    ("rollout tok/s", 13),
    ("one at a time tok/s", 19),
    ("accepted length", 15),
    ("draft version", 13),
    ("learned s", 9),
    ("held-out accepted", 17),
)
_ARM_COLUMNS = (
    ("arm", -6),
    ("tok/s", 7),
    ("vs none", 8),
    ("accepted length", 15),
    ("step ms", 8),
    ("tokens", -24),
    ("", -18),
)
_DASH = "-"


def _row(cells: Sequence[str], columns: Sequence[tuple[str, int]]) -> str:
    """Cells padded to their columns: a negative width aligns left."""
    padded = [cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, (_, width) in zip(cells, columns, strict=True)]
    return "  ".join(padded).rstrip()


def number(value: float | None, digits: int) -> str:
    """A number with so many digits after the point, a dash when there is none."""
    return _DASH if value is None else f"{value:.{digits}f}"


def round_header() -> str:
    """The live table's head."""
    return _row([title for title, _ in _ROUND_COLUMNS], _ROUND_COLUMNS)


def round_line(*, index: int, burst: Burst, status: Mapping[str, Any]) -> str:
    """The live table's row after one burst. `status` is the server's after the burst."""
    learning = status["learning"]
    cells = (
        str(index),
        number(burst.tokens_per_s, 1),
        number(burst.single_tokens_per_s, 1),
        number(burst.accepted_length, 2),
        str(status["draft_version"]),
        number(learning["seconds"], 0),
        number(learning["held_out_served"], 2),
    )
    return _row(cells, _ROUND_COLUMNS)


def publish_line(publish: Mapping[str, Any]) -> str:
    """What a published draft gained on held-out samples."""
    before, after = number(publish.get("held_out_before"), 2), number(publish.get("held_out_after"), 2)
    swap = number(publish.get("swap_ms"), 0)
    gain = f"accepted length on held-out samples {before} -> {after}"
    return f"       draft {publish['draft_version']} published: {gain}, swap {swap} ms"


def pause_line(status: Mapping[str, Any], left_s: float) -> str:
    """The progress line of a pause."""
    learning = status["learning"]
    held_out = f"{number(learning['held_out_served'], 2)} served, {number(learning['held_out_candidate'], 2)} learning"
    return (
        f"       pause, {left_s:.0f} s left: {status['idle_state']}, learned {learning['seconds']:.0f} s, "
        f"{learning['tokens']} tokens, loss {number(learning['loss'], 3)}, held-out {held_out}"
    )


def verdict_of(summary: ArmSummary) -> str:
    """Whether an arm wins or loses against the plain engine, in words."""
    if summary.arm == NONE:
        return ""
    if summary.ratio < 1.0:
        return "slower than none"
    return "faster than none" if summary.ratio > 1.0 else "as fast as none"


def identity_of(arm: str, *, answers: int, differing: int, ties: int) -> str:
    """Whether an arm's greedy tokens are the plain engine's. `ties` of `differing` part where two logits tie."""
    if arm == NONE:
        return ""
    if not differing:
        return f"identical ({answers})"
    if differing == ties:
        return f"identical but {ties} ties"
    return f"{differing - ties} of {answers} DIFFER"


def comparison_lines(summaries: Sequence[ArmSummary], identities: Mapping[str, str]) -> list[str]:
    """The table of arms. `identities` says for *first* and *live* whether their tokens are the plain engine's."""
    lines = [_row([title for title, _ in _ARM_COLUMNS], _ARM_COLUMNS)]
    for summary in summaries:
        cells = (
            summary.arm,
            number(summary.tokens_per_s, 1),
            f"{summary.ratio:.2f}x",
            number(summary.accepted_length, 2),
            number(summary.step_ms, 1),
            identities.get(summary.arm, ""),
            verdict_of(summary),
        )
        lines.append(_row(cells, _ARM_COLUMNS))
    return lines


def legend() -> str:
    """What the arms' names mean."""
    return (
        f"{NONE}: the stock engine, no plugin; {FIRST}: the draft before it learned; {LIVE}: the draft that learned. "
        "Medians over interleaved pairs."
    )
