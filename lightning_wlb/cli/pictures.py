"""Pictures of `lightning-wlb plan`: timelines of steps.

A step has a row for each pipeline rank of each replica; its context and tensor ranks work side by
side. Timelines share one time axis and say for whom a rank waits: the pipeline rank that sends what
it needs next, the replicas that share its next micro-batch, or at the end the last replica.

Cost: linear in the number of actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
"""Rows are labelled and bars numbered in timelines of up to this number of ranks."""

_MS = 10**6
"""Nanoseconds."""


class TimelineRow(NamedTuple):
    """A pipeline rank of a replica in a step."""

    name: str  #: such as ``replica 0, rank 1``
    spans: tuple[Span, ...]
    #: begin and end in ns, and the name of the row that ends the wait, if it is known
    waits: tuple[tuple[int, int, str], ...]
    #: share of the time, from the replica's first action to the step's last, in which it waits
    idle: float


def rows_of(step: Sequence[Simulation]) -> list[TimelineRow]:
    """The rows of a step, replica by replica; all replicas end together."""
    single = len(step) == 1, all(len(replica.spans) == 1 for replica in step)
    names: dict[tuple[int, int], str] = {}
    by_micro_batch: dict[tuple[int, int], list[tuple[int, str]]] = {}
    ends: dict[int, str] = {}
    for number, replica in enumerate(step):
        for rank, spans in enumerate(replica.spans):
            words = f"replica {number}", f"rank {rank}"
            kept = [word for word, alone in zip(words, single, strict=True) if not alone]
            name = names[number, rank] = ", ".join(kept) or "rank 0"
            for action, _, end in spans:
                by_micro_batch.setdefault((number, action.micro_batch), []).append((end, name))
                ends[end] = name
    rows = []
    for number, replica in enumerate(step):
        for rank, spans in enumerate(replica.spans):
            name, waits, at = names[number, rank], [], replica.begin_ns
            for action, begin, end in spans:
                if begin > at:
                    own = by_micro_batch[number, action.micro_batch]
                    before = [each for each in own if each[0] <= begin and each[1] != name]
                    end_before, other = max(before, default=(-1, ""))
                    # Its input may still be on its way; else replicas that share it were late.
                    waits.append((at, begin, other if end_before > at else ends.get(begin, other)))
                at = end
            if at < replica.compute_ns:
                waits.append((at, replica.compute_ns, ends[replica.compute_ns]))
            whole = replica.compute_ns - replica.begin_ns
            idle = replica.idle_ns[rank] / whole if whole else 0.0
            rows.append(TimelineRow(name, tuple(spans), tuple(waits), idle))
    return rows


def draw_gantt(path: Path, timelines: Mapping[str, Sequence[Simulation]], title: str) -> None:
    """Draw timelines, at least one, below each other as PNG, making the file's folder.

    A bar is an action with its micro-batch's number, if there is room for it. Beside each row
    stands the share of time in which it waits, and above each step that of all its rows.
    """
    steps = {name: (step, rows_of(step)) for name, step in timelines.items()}
    heights = [0.9 + min(0.36 * len(rows), 9.0) for _, rows in steps.values()]
    figure = new_figure(12, sum(heights) + 0.9)
    figure.suptitle(title, fontsize=12)
    panels = figure.subplots(
        len(steps), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    end = max(step[0].total_ns for step, _ in steps.values())
    stages = max([1, *(len(_stages(row.spans)) for _, rows in steps.values() for row in rows)])
    for panel, (name, (step, rows)) in zip(panels, steps.items(), strict=True):
        idle = sum(row.idle for row in rows) / len(rows)
        shown = f"{name}: {step[0].total_ns / _MS:,.1f} ms, {idle:.1%} idle"
        panel.set_title(shown, fontsize=10, loc="left")
        _draw_rows(panel, step[0], rows, stages, end)
    panels[-1].set_xlabel("time from the start of the step (ms)", fontsize=9)
    handles = _legend(stages, any(step[0].synchronisation_ns for step, _ in steps.values()))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 4),
        fontsize=9,
        frameon=False,
        title="number in a bar, where there is room: micro-batch",
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
    return [*patches, Patch(label="waits, and for whom", **IDLE)]


def _draw_rows(
    panel: Axes, step: Simulation, rows: Sequence[TimelineRow], stages: int, end: int
) -> None:
    """Draw a timeline; ``step`` is any of its replicas.

    The time axis ends at ``end`` ns; a row of the picture has at most ``stages`` stages.
    """
    labelled = len(rows) <= MOST_LABELLED_RANKS
    # The panel is about 10 inches wide, a digit of 7 points about 4.5.
    room_for_digit = end / (10 * 72 / 4.5)

    def write(number: int, begin: int, stop: int, text: str, colour: str) -> None:
        if labelled and stop - begin >= (len(text) + 0.5) * room_for_digit:
            look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 3}
            at = (begin + stop) / 2 / _MS
            panel.text(at, number, text, color=colour, fontsize=7, **look)

    for number, row in enumerate(rows):
        turns = _stages(row.spans)
        colours = [
            _colour(action.kind == FORWARD, turns.index(action.stage), stages)
            for action, _, _ in row.spans
        ]
        idle = [(begin, stop) for begin, stop, _ in row.waits]
        _bars(panel, number, idle, zorder=1, **IDLE)
        for begin, stop, other in row.waits:
            write(number, begin, stop, other and f"for {other}", "black")
        look = {"facecolors": colours, "edgecolors": "white", "linewidth": 0.4}
        _bars(panel, number, [each[1:] for each in row.spans], zorder=2, **look)
        for (action, begin, stop), colour in zip(row.spans, colours, strict=True):
            write(number, begin, stop, str(action.micro_batch), text_colour(colour))
        if step.synchronisation_ns:
            synchronisation = [(step.compute_ns, step.total_ns)]
            _bars(panel, number, synchronisation, zorder=2, linewidth=0.5, **SYNCHRONISATION)
        if labelled and step.compute_ns:
            beside = panel.get_yaxis_transform()
            idle_share = f"{row.idle:.0%} idle"
            panel.text(1.005, number, idle_share, transform=beside, fontsize=8, va="center")
    panel.set_xlim(0, end / _MS or 1)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right", "left"]].set_visible(False)
    if labelled:
        panel.set_yticks(range(len(rows)), [row.name for row in rows])
        panel.tick_params(axis="y", length=0)
    else:
        panel.set_ylabel("pipeline ranks of all replicas", fontsize=9)


def _bars(panel: Axes, rank: int, times: Iterable[tuple[int, int]], **look: Any) -> None:
    """Bars in a rank's row, from begin to end in ns."""
    widths = [(begin / _MS, (stop - begin) / _MS) for begin, stop in times]
    panel.broken_barh(widths, (rank - 0.42, 0.84), **look)


def _stages(spans: Iterable[Span]) -> list[int]:
    return sorted({span.action.stage for span in spans})


def _colour(forward: bool, turn: int, stages: int) -> tuple[float, float, float]:
    """Red, green and blue for the ``turn``-th of a rank's ``stages``."""
    # A rank's only stage is drawn half way, which is neither blackish nor pale.
    share = turn / (stages - 1) if stages > 1 else 0.5 if forward else 0.0
    first, second = map(to_rgb, FORWARD_COLOURS if forward else BACKWARD_COLOURS)
    red, green, blue = (a + (b - a) * share for a, b in zip(first, second, strict=True))
    return red, green, blue
