"""Pictures of `lightning-wlb plan`: timelines of steps, also as a trace.

Timelines are simulated steps by name, drawn on one time axis, or written for Perfetto or
chrome://tracing. Cost: linear in the number of actions. A picture of more than a few thousand
actions is better read as a trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from lightning_wlb.callbacks.heat_map import new_figure, save_png, text_colour
from lightning_wlb.schedule.actions import FORWARD, Span
from lightning_wlb.schedule.simulator import Simulation

# From dark blue to orange and pale yellow: forward is darker than backward without colour vision
# and in print, and within each the stages of one rank go from dark to light.
FORWARD_COLOURS = ("#08306b", "#4292c6")
BACKWARD_COLOURS = ("#e69f00", "#fbe3a8")
IDLE: dict[str, Any] = {"facecolor": "#ececec"}
SYNCHRONISATION: dict[str, Any] = {"facecolor": "white", "edgecolor": "#8a8a8a", "hatch": "////"}

MOST_LABELLED_RANKS = 32
"""Rows are labelled and bars numbered in timelines of up to so many ranks."""

_UNITS = (("s", 10**9), ("ms", 10**6), ("µs", 10**3), ("ns", 1))


def write_trace(path: Path, timelines: Mapping[str, Simulation]) -> None:
    """Write timelines in the Trace Event Format, as one JSON object, making the file's folder.

    Each timeline is a process and each rank a thread of it. Actions are named as in a program
    (``2F0``) and carry stage and micro-batch. Simulations with memory have a counter of bytes for
    each rank.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events += _events(process, name, timeline)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _events(process: int, name: str, step: Simulation) -> Iterator[dict[str, Any]]:
    yield from _named("process", name, process, {"pid": process})
    for rank, spans in enumerate(step.spans):
        place = {"pid": process, "tid": rank}
        yield from _named("thread", f"rank {rank}", rank, place)
        for action, begin, end in spans:
            arguments = {"stage": action.stage, "micro_batch": action.micro_batch}
            kind = "forward" if action.kind == FORWARD else "backward"
            yield _bar(str(action), kind, begin, end, place, arguments)
        if step.synchronisation_ns:
            name, kind = "gradient synchronisation", "communication"
            yield _bar(name, kind, step.compute_ns, step.total_ns, place, {})
    for rank, changes in enumerate(step.memory):
        # Without opened bytes there is one entry, the constant, and nothing to follow.
        for time, held in changes if len(changes) > 1 else ():
            counter = {"name": f"bytes held by rank {rank}", "ph": "C", "pid": process}
            yield {**counter, "ts": time / 1000, "args": {"bytes": held}}


def _named(kind: str, name: str, number: int, place: dict[str, int]) -> list[dict[str, Any]]:
    """The events that give a process or a thread its name and its order."""
    return [
        {"name": f"{kind}_name", "ph": "M", **place, "args": {"name": name}},
        {"name": f"{kind}_sort_index", "ph": "M", **place, "args": {"sort_index": number}},
    ]


def _bar(
    name: str, kind: str, begin: int, end: int, place: dict[str, int], arguments: dict[str, Any]
) -> dict[str, Any]:
    """A complete event; the format counts in microseconds."""
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"name": name, "cat": kind, "ph": "X", **times, **place, "args": arguments}


def draw_gantt(path: Path, timelines: Mapping[str, Simulation], title: str) -> None:
    """Draw timelines, at least one, below each other as PNG, making the file's folder.

    A row is a rank, a bar an action with its micro-batch's number, if there is room for it. Beside
    each row stands the fraction of the time before gradient synchronisation in which the rank runs
    no action.
    """
    steps = timelines.values()
    heights = [0.9 + min(0.36 * len(step.spans), 9.0) for step in steps]
    figure = new_figure(12, sum(heights) + 0.9)
    figure.suptitle(title, fontsize=12)
    panels = figure.subplots(
        len(steps), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    end = max(step.total_ns for step in steps)
    unit, size = next((unit for unit in _UNITS if end >= 5 * unit[1]), _UNITS[-1])
    stages = max([1, *(len(_stages(spans)) for step in steps for spans in step.spans)])
    numbered = False
    for panel, (name, step) in zip(panels, timelines.items(), strict=True):
        panel.set_title(f"{name}: {_shown(step.total_ns / size)} {unit}", fontsize=10, loc="left")
        numbered |= _draw_rows(panel, step, size, stages, end)
    panels[-1].set_xlabel(f"time from the start of the step ({unit})", fontsize=9)
    handles = _legend(stages, any(step.synchronisation_ns for step in steps))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 4),
        fontsize=9,
        frameon=False,
        title="number in a bar: micro-batch" if numbered else None,
        title_fontsize=9,
    )
    save_png(figure, path)


def _legend(stages: int, synchronisation: bool) -> list[Patch]:
    patches = []
    for kind in ("forward", "backward"):
        for turn in range(stages):
            which = f", the rank's stage {turn + 1} of {stages}" if stages > 1 else ""
            colour = _colour(kind == "forward", turn, stages)
            patches.append(Patch(facecolor=colour, label=kind + which))
    if synchronisation:
        patches.append(Patch(label="gradient synchronisation", **SYNCHRONISATION))
    return [*patches, Patch(label="idle", **IDLE)]


def _draw_rows(panel: Axes, step: Simulation, size: int, stages: int, end: int) -> bool:
    """Draw a timeline, and return whether any bar had room for its micro-batch's number.

    The time axis counts in units of ``size`` ns and ends at ``end`` ns; a rank of the picture has
    at most so many ``stages``.
    """
    numbered = False
    ranks = len(step.spans)
    labelled = ranks <= MOST_LABELLED_RANKS
    # The panel is about 10.5 inches wide, a digit of 7 points about 4.5.
    room_for_digit = end / (10.5 * 72 / 4.5)
    for rank, spans in enumerate(step.spans):
        turns = _stages(spans)
        colours = [
            _colour(action.kind == FORWARD, turns.index(action.stage), stages)
            for action, _, _ in spans
        ]
        actions = [(begin, stop) for _, begin, stop in spans]
        _bars(panel, rank, [(0, step.compute_ns)], size, zorder=1, **IDLE)
        look = {"facecolors": colours, "edgecolors": "white", "linewidth": 0.4}
        _bars(panel, rank, actions, size, zorder=2, **look)
        for (action, begin, stop), colour in zip(spans, colours, strict=True):
            text = str(action.micro_batch)
            if labelled and stop - begin >= (len(text) + 0.5) * room_for_digit:
                numbered = True
                panel.text(
                    (begin + stop) / 2 / size,
                    rank,
                    text,
                    color=text_colour(colour),
                    fontsize=7,
                    ha="center",
                    va="center_baseline",
                    zorder=3,
                )
        if step.synchronisation_ns:
            synchronisation = [(step.compute_ns, step.total_ns)]
            _bars(panel, rank, synchronisation, size, zorder=2, linewidth=0.5, **SYNCHRONISATION)
        if labelled and step.compute_ns:
            busy = sum(span.end_ns - span.begin_ns for span in spans)
            idle = f"{1 - busy / step.compute_ns:.0%} idle"
            beside = panel.get_yaxis_transform()
            panel.text(1.005, rank, idle, transform=beside, fontsize=8, va="center")
    panel.set_xlim(0, end / size or 1)
    panel.set_ylim(ranks - 0.5, -0.5)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right", "left"]].set_visible(False)
    if labelled:
        panel.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        panel.tick_params(axis="y", length=0)
    else:
        panel.set_ylabel("rank", fontsize=9)
    return numbered


def _bars(panel: Axes, rank: int, times: Iterable[tuple[int, int]], size: int, **look: Any) -> None:
    """Bars in a rank's row, from begin to end in ns."""
    widths = [(begin / size, (stop - begin) / size) for begin, stop in times]
    panel.broken_barh(widths, (rank - 0.42, 0.84), **look)


def _stages(spans: Iterable[Span]) -> list[int]:
    return sorted({span.action.stage for span in spans})


def _shown(value: float) -> str:
    """Three digits, or more before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _colour(forward: bool, turn: int, stages: int) -> tuple[float, float, float]:
    """Red, green and blue for the ``turn``-th of a rank's ``stages``."""
    # A rank's only stage is drawn half way, which is neither blackish nor pale.
    share = turn / (stages - 1) if stages > 1 else 0.5 if forward else 0.0
    first, second = map(to_rgb, FORWARD_COLOURS if forward else BACKWARD_COLOURS)
    red, green, blue = (a + (b - a) * share for a, b in zip(first, second, strict=True))
    return red, green, blue
