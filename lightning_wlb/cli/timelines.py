"""A timeline as a trace for Perfetto or chrome://tracing, and as a picture.

Both take any number of named timelines, predicted (:class:`Simulation`) and measured (each rank's
:class:`Timing` list) alike, and put them on one time axis, so that prediction and measurement
compare action by action. Ranks measured on their own clocks are aligned at the start of the step
(see :func:`~lightning_wlb.schedule.timeline.spans_of`). Linear in the number of actions; a picture
of more than some thousand actions is better read as a trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_wlb.schedule.actions import FORWARD, Action
from lightning_wlb.schedule.simulate import Simulation
from lightning_wlb.schedule.timeline import Span, Timing, spans_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Timeline = Simulation | Sequence[Sequence[Timing]]
"""A predicted step, or the timings that every rank of a pipeline measured in one."""

# From dark blue to orange and pale yellow: forward is darker than backward without colour vision
# and in print, and within each the stages of one rank go from dark to light.
FORWARD_COLOURS = ("#08306b", "#4292c6")
BACKWARD_COLOURS = ("#e69f00", "#fbe3a8")
SYNCHRONISATION_COLOUR = "#8a8a8a"

MOST_LABELLED_RANKS = 32

_UNITS = (("s", 10**9), ("ms", 10**6), ("µs", 10**3), ("ns", 1))


def write_trace(path: Path, timelines: Mapping[str, Timeline]) -> None:
    """Write timelines in the Trace Event Format, as one JSON object.

    Each timeline is a process and each rank a thread of it. Actions are named as in a program
    (``2F0``) and carry stage and micro-batch, measured ones also the milliseconds of ``compute``
    and ``attention``. Simulations with memory have a counter of bytes for each rank.

    Args:
        path: of the file; its folder is made.
        timelines: by name.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events += _events(process, name, timeline)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def draw_gantt(path: Path, timelines: Mapping[str, Timeline], title: str = "") -> None:
    """Draw timelines below each other, on one time axis, as PNG.

    A row is a rank, a bar an action with its micro-batch's number, where there is room for it.
    Beside each row stands the share of the time before gradient synchronisation in which the rank
    runs no action.

    Args:
        path: of the file; its folder is made.
        timelines: by name; at least one.
        title: above the picture.

    Raises:
        ValueError: if there is no timeline.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if not timelines:
        raise ValueError("there is no timeline to draw.")
    rows = {name: _Rows.of(timeline) for name, timeline in timelines.items()}
    heights = [0.9 + min(0.36 * len(each.spans), 9.0) for each in rows.values()]
    figure = Figure(figsize=(12, sum(heights) + 0.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=12)
    panels = figure.subplots(
        len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    end = max(each.end_ns for each in rows.values())
    unit, size = next((unit for unit in _UNITS if end >= 5 * unit[1]), _UNITS[-1])
    stages = max(each.virtual_stages for each in rows.values())
    numbered = False
    for panel, (name, each) in zip(panels, rows.items(), strict=True):
        panel.set_title(f"{name}: {_shown(each.end_ns / size)} {unit}", fontsize=10, loc="left")
        numbered |= _draw_rows(panel, each, size, stages, end)
    panels[-1].set_xlabel(f"time from the start of the step ({unit})", fontsize=9)

    handles = []
    for kind in ("forward", "backward"):
        for turn in range(stages):
            colour = _colour(kind == "forward", turn, stages)
            which = f", the rank's stage {turn + 1} of {stages}" if stages > 1 else ""
            handles.append(Patch(facecolor=colour, label=kind + which))
    if any(each.synchronisation is not None for each in rows.values()):
        handles.append(
            Patch(
                facecolor="white",
                edgecolor=SYNCHRONISATION_COLOUR,
                hatch="////",
                label="gradient synchronisation",
            )
        )
    handles.append(Patch(facecolor="#ececec", label="idle"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 4),
        fontsize=9,
        frameon=False,
        title="number in a bar: micro-batch" if numbered else None,
        title_fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _shown(value: float) -> str:
    """Three digits, or more before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


class _Rows(NamedTuple):
    """A timeline as it is drawn: for each rank its spans."""

    spans: Sequence[Sequence[Span]]
    compute_ns: int
    synchronisation: tuple[int, int] | None

    @staticmethod
    def of(timeline: Timeline) -> _Rows:
        if isinstance(timeline, Simulation):
            synchronisation = None
            if timeline.synchronisation_ns:
                synchronisation = (timeline.compute_ns, timeline.total_ns)
            return _Rows(timeline.spans, timeline.compute_ns, synchronisation)
        spans = [spans_of(timings) for timings in timeline]
        last = max((span.end_ns for rank in spans for span in rank), default=0)
        return _Rows(spans, last, None)

    @property
    def end_ns(self) -> int:
        return self.synchronisation[1] if self.synchronisation else self.compute_ns

    @property
    def virtual_stages(self) -> int:
        return max((len(_stages(rank)) for rank in self.spans), default=1) or 1


def _stages(spans: Iterable[Span]) -> list[int]:
    return sorted({span.action.stage for span in spans})


def _events(process: int, name: str, timeline: Timeline) -> list[dict[str, Any]]:
    rows = _Rows.of(timeline)
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}},
    ]
    for rank, spans in enumerate(rows.spans):
        place = {"pid": process, "tid": rank}
        events.append({"name": "thread_name", "ph": "M", **place, "args": {"name": f"rank {rank}"}})
        events.append(
            {"name": "thread_sort_index", "ph": "M", **place, "args": {"sort_index": rank}}
        )
        for number, (action, begin, end) in enumerate(spans):
            arguments: dict[str, Any] = {"stage": action.stage, "micro_batch": action.micro_batch}
            if not isinstance(timeline, Simulation):
                timing = timeline[rank][number]
                arguments["compute_ms"] = timing.compute * 1e3
                arguments["attention_ms"] = timing.attention * 1e3
            kind = "forward" if action.kind == FORWARD else "backward"
            events.append(_bar(str(action), kind, begin, end, place, arguments))
        if rows.synchronisation is not None:
            events.append(
                _bar("gradient synchronisation", "communication", *rows.synchronisation, place, {})
            )
    if isinstance(timeline, Simulation):
        for rank, changes in enumerate(timeline.memory):
            # Without opened bytes there is one entry, the constant, and nothing to follow.
            for at, held in changes if len(changes) > 1 else ():
                counter = f"bytes held by rank {rank}"
                events.append(
                    {
                        "name": counter,
                        "ph": "C",
                        "pid": process,
                        "ts": at / 1000,
                        "args": {"bytes": held},
                    }
                )
    return events


def _bar(
    name: str, kind: str, begin: int, end: int, place: dict[str, int], arguments: dict[str, Any]
) -> dict[str, Any]:
    """A complete event; the format counts in microseconds."""
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        **place,
        "args": arguments,
    }


def _draw_rows(panel: Axes, rows: _Rows, size: int, stages: int, end: int) -> bool:
    """Draw a timeline; whether any bar had room for its micro-batch's number."""
    numbered = False
    ranks = len(rows.spans)
    # The panel is about 10.5 inches wide, a digit of 7 points about 4.5.
    room_for_digit = end / (10.5 * 72 / 4.5)
    for rank, spans in enumerate(rows.spans):
        turns = {stage: turn for turn, stage in enumerate(_stages(spans))}
        panel.broken_barh(
            [(0, rows.compute_ns / size)], (rank - 0.42, 0.84), facecolors="#ececec", zorder=1
        )
        panel.broken_barh(
            [(span.begin_ns / size, (span.end_ns - span.begin_ns) / size) for span in spans],
            (rank - 0.42, 0.84),
            facecolors=[
                _colour(span.action.kind == FORWARD, turns[span.action.stage], stages)
                for span in spans
            ],
            edgecolors="white",
            linewidth=0.4,
            zorder=2,
        )
        for action, begin, stop in spans:
            text = str(action.micro_batch)
            if stop - begin >= (len(text) + 0.5) * room_for_digit and ranks <= MOST_LABELLED_RANKS:
                numbered = True
                panel.text(
                    (begin + stop) / 2 / size,
                    rank,
                    text,
                    color=_text_colour(action, turns, stages),
                    fontsize=7,
                    ha="center",
                    va="center_baseline",
                    zorder=3,
                )
        if rows.synchronisation is not None:
            begin, stop = rows.synchronisation
            panel.broken_barh(
                [(begin / size, (stop - begin) / size)],
                (rank - 0.42, 0.84),
                facecolors="white",
                edgecolors=SYNCHRONISATION_COLOUR,
                linewidth=0.5,
                hatch="////",
                zorder=2,
            )
        if ranks <= MOST_LABELLED_RANKS and rows.compute_ns:
            busy = sum(span.end_ns - span.begin_ns for span in spans)
            panel.text(
                1.005,
                rank,
                f"{1 - busy / rows.compute_ns:.0%} idle",
                transform=panel.get_yaxis_transform(),
                fontsize=8,
                va="center",
            )
    panel.set_xlim(0, end / size or 1)
    panel.set_ylim(ranks - 0.5, -0.5)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right", "left"]].set_visible(False)
    if ranks <= MOST_LABELLED_RANKS:
        panel.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        panel.tick_params(axis="y", length=0)
    else:
        panel.set_ylabel("rank", fontsize=9)
    return numbered


def _mix(colours: tuple[str, str], share: float) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    first, second = (to_rgb(colour) for colour in colours)
    red, green, blue = (a + (b - a) * share for a, b in zip(first, second, strict=True))
    return red, green, blue


def _colour(forward: bool, turn: int, stages: int) -> tuple[float, float, float]:
    """Of the ``turn``-th stage of a rank among ``stages``."""
    # One stage per rank is drawn half way, which is neither blackish nor pale.
    share = turn / (stages - 1) if stages > 1 else 0.5 if forward else 0.0
    return _mix(FORWARD_COLOURS if forward else BACKWARD_COLOURS, share)


def _text_colour(action: Action, turns: Mapping[int, int], stages: int) -> str:
    red, green, blue = _colour(action.kind == FORWARD, turns[action.stage], stages)
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
