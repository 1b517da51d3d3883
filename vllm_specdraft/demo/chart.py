"""The picture of a run, drawn from its events: accepted length and rollout speed over time, and the arms compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_specdraft.demo.compare import B1, FIRST, LIVE, NONE

# Blue, orange and grey can be told apart with any colour vision.
_COLOURS = {LIVE: "#0b6fb8", FIRST: "#e08214", NONE: "#6b6b6b", "eagle3": "#0b6fb8", "dflash": "#e08214"}
_OTHER = "#7b4fa3"
_PAUSE_COLOUR = "#eef2e6"
_MOST_LABELS = 14
_PUBLISH_COLOUR = "#2e7d32"


def of_kind(events: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of one kind, in order."""
    return [event for event in events if event["kind"] == kind]


def minutes(seconds: float) -> float:
    """Seconds as minutes."""
    return seconds / 60.0


def draw(events: Sequence[dict[str, Any]], path: Path, *, title: str) -> bool:
    """Write the chart as PNG; return False, and write nothing, when the events hold no burst yet.

    Raises `ImportError` with the command to run when matplotlib is absent.
    """
    if not of_kind(events, "burst"):
        return False
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("charts need matplotlib: run `pip install 'vllm-specdraft[plots]'`") from None
    summaries = [event for event in of_kind(events, "comparison") if event["phase"] == B1]
    figure = pyplot.figure(figsize=(12, 7.5), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3.2, 1)) if summaries else figure.add_gridspec(2, 1)
    accepted = figure.add_subplot(grid[0, 0])
    speed = figure.add_subplot(grid[1, 0], sharex=accepted)
    _accepted_over_time(accepted, events)
    _speed_over_time(speed, events)
    for axes in (accepted, speed):
        _shade_pauses(axes, events)
        _mark_publishes(axes, events)
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
        axes.legend(loc="best", fontsize=9)
    if summaries:
        arms = summaries[-1]["arms"]
        _bars(figure.add_subplot(grid[0, 1]), arms, "accepted_length", "accepted length (tokens per step)", "{:.2f}")
        _bars(figure.add_subplot(grid[1, 1]), arms, "tokens_per_s", "tokens per second, one request", "{:.1f}")
    figure.suptitle(title, fontsize=13)
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _accepted_over_time(axes: Any, events: Sequence[dict[str, Any]]) -> None:
    bursts = [burst for burst in of_kind(events, "burst") if burst["accepted_length"] is not None]
    values = [burst["accepted_length"] for burst in bursts]
    for server, group in _by_server(bursts).items():
        middles = [minutes(burst["t_s"] - burst["wall_s"] / 2) for burst in group]
        label = "validation answers, served draft" + _of(server)
        axes.plot(middles, [burst["accepted_length"] for burst in group], "o-", color=_colour(server), label=label)
    polls = [poll for poll in of_kind(events, "poll") if poll.get("held_out_candidate") is not None]
    for index, group in enumerate(_by_server(polls).values()):
        axes.plot(
            [minutes(poll["t_s"]) for poll in group],
            [poll["held_out_candidate"] for poll in group],
            ".:",
            color=_PUBLISH_COLOUR,
            linewidth=1.2,
            label=None if index else "held-out samples, draft being trained",
        )
    axes.axhline(1.0, color=_COLOURS[NONE], linestyle="--", linewidth=1.2, label="none (one token per step)")
    axes.set_ylabel("accepted length (tokens per step)")
    axes.set_title("Accepted length, bonus token included", fontsize=11, loc="left")
    top = max([*values, *(poll["held_out_candidate"] for poll in polls), 1.5])
    axes.set_ylim(0.9, top * 1.08)


def _speed_over_time(axes: Any, events: Sequence[dict[str, Any]]) -> None:
    bursts = of_kind(events, "burst")
    for server, group in _by_server(bursts).items():
        for index, burst in enumerate(group):
            label = "validation answers, served draft" + _of(server) if index == 0 else None
            start, end = minutes(burst["t_s"] - burst["wall_s"]), minutes(burst["t_s"])
            axes.plot([start, end], [burst["single_tokens_per_s"]] * 2, color=_colour(server), linewidth=4, label=label)
        middles = [minutes(burst["t_s"] - burst["wall_s"] / 2) for burst in group]
        axes.plot(middles, [burst["single_tokens_per_s"] for burst in group], color=_colour(server), linewidth=1, alpha=0.6)
    references = of_kind(events, "none_burst")
    for reference in references[-1:]:
        value = reference["single_tokens_per_s"]
        axes.axhline(value, color=_COLOURS[NONE], linestyle="--", linewidth=1.2, label="none, measured at the end")
    axes.set_ylabel("speed (tokens per second)")
    axes.set_xlabel("time since the start (minutes)")
    axes.set_title("Speed of validation answers, one at a time, greedy", fontsize=11, loc="left")
    top = max(event["single_tokens_per_s"] for event in [*bursts, *references])
    axes.set_ylim(0, top * 1.2)


def _by_server(events: Sequence[dict[str, Any]]) -> dict[str | None, list[dict[str, Any]]]:
    """Events by the server that they are of; one line is drawn for each."""
    groups: dict[str | None, list[dict[str, Any]]] = {}
    for event in events:
        groups.setdefault(event.get("server"), []).append(event)
    return groups


def _colour(server: str | None) -> str:
    return _COLOURS.get(server or LIVE, _OTHER)


def _of(server: str | None) -> str:
    return f" ({server})" if server else ""


def _shade_pauses(axes: Any, events: Sequence[dict[str, Any]]) -> None:
    for index, pause in enumerate(of_kind(events, "pause")):
        label = "pause: the draft learns" if index == 0 else None
        axes.axvspan(minutes(pause["t_s"] - pause["wall_s"]), minutes(pause["t_s"]), color=_PAUSE_COLOUR, zorder=0, label=label)


def _mark_publishes(axes: Any, events: Sequence[dict[str, Any]]) -> None:
    publishes = of_kind(events, "publish")
    # With many publishes only some carry their version, or the labels would lie on top of each other.
    every = 1 + len(publishes) // _MOST_LABELS
    for index, publish in enumerate(publishes):
        label = "draft published" if index == 0 else None
        at = minutes(publish["at_s"])
        axes.axvline(at, color=_PUBLISH_COLOUR, linewidth=1, alpha=0.8, label=label)
        if index % every:
            continue
        text = f"v{publish['draft_version']}"
        axes.annotate(text, (at, 1), xycoords=("data", "axes fraction"), xytext=(2, -10), textcoords="offset points", fontsize=8)


def _bars(axes: Any, arms: Sequence[dict[str, Any]], field: str, label: str, form: str) -> None:
    names = [arm["arm"] for arm in arms]
    values = [arm[field] for arm in arms]
    bars = axes.bar(names, values, color=[_COLOURS.get(name, _OTHER) for name in names], width=0.65)
    axes.bar_label(bars, labels=[form.format(value) for value in values], padding=2, fontsize=9)
    axes.set_ylim(0, max(values) * 1.18)
    axes.set_ylabel(label)
    axes.set_title("Held-out prompts, greedy", fontsize=11, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
