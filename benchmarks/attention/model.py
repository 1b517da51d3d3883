"""What the two forms of context parallelism cost at long contexts, from the formulas that counted bytes are held against."""

from __future__ import annotations

from pathlib import Path

from specdraft_kernels.zigzag_ring import ZigzagLayout, held_bytes, sent_bytes

TOKENS, WIDTH, ENTRY_BYTES, PASSES = 262_144, 8 * 128, 2, 3
RANKS = (1, 2, 4, 8, 16, 32, 64)


def table() -> list[dict[str, float]]:
    """Per number of ranks: GB sent and held by each form, for one layer, 3 passes in bf16, 8 key heads of 128."""
    rows = []
    for ranks in RANKS:
        layout = ZigzagLayout([TOKENS], ranks)
        row: dict[str, float] = {"ranks": ranks}
        for form in ("ring", "gather"):
            row[f"{form}_sent_gb"] = sent_bytes(form, layout, WIDTH, ENTRY_BYTES, passes=PASSES) / 1e9
            row[f"{form}_held_gb"] = held_bytes(form, layout, WIDTH, ENTRY_BYTES) / 1e9
        rows.append(row)
    return rows


def plot(path: Path) -> None:
    """A picture of `table`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = table()
    figure, (sent, held) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, what, title in ((sent, "sent", "sent per rank, GB"), (held, "held", "held beside the own share, GB")):
        for form, mark in (("ring", "o"), ("gather", "s")):
            axes.plot([row["ranks"] for row in rows], [row[f"{form}_{what}_gb"] for row in rows], marker=mark, label=form)
        axes.set_xscale("log", base=2)
        axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
        axes.set_xlabel("context-parallel ranks")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    sent.legend()
    figure.suptitle(f"One layer, {TOKENS // 1024}K tokens, {PASSES} passes, bf16, 8 key heads of 128", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
