"""The heat map of a run: how long each rank computes in each micro-batch, and how long it waits.

The left panel shows a real step, that of median waiting among the last ones, in milliseconds by
rank and micro-batch. (A heavy micro-batch stands at another place in every step, so that a mean
over steps would look balanced whatever the imbalance.) The right panel shows for each rank what it
has computed and waited in all measured steps: the rest of a step's time, in which it waits for
other ranks or for messages. A sentence below says what causes most of the waiting and what to do
about it. Colours differ in lightness, so that they can be read without colour vision and in print.

A row is a rank, whatever its pipeline: a step may leave the mesh for pipelines of different sizes.

Figures need no display and leave no global state: they use matplotlib's objects, not pyplot.

Cost: ranks × micro-batches numbers for each of the last steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text

from lightning_wlb.callbacks import imbalance
from lightning_wlb.file_checks import check_links, written_aside
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.plan import Schemes, rank_in

KEPT_STEPS = 64
"""How many of the last steps are kept; the step of median waiting is chosen from these."""

MOST_LABELS = 16
"""Up to this number of rows or columns, each has a label and its cells have numbers."""

LITTLE = 0.05
"""A share of waiting in the ranks' time below which there is nothing to gain."""

COMPUTE_COLOUR, WAIT_COLOUR = "#6baed6", "#e0e0e0"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of ``width`` × ``height`` inches, at 150 dots per inch."""
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure, never through a link, making the folder of the file.

    No text goes to LaTeX, which a ``matplotlibrc`` of the working folder may ask for.
    """
    check_links(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    for text in figure.findobj(Text):
        text.set_usetex(False)
    # Labels of axes are made only when they are drawn.
    with rc_context({"text.usetex": False}), written_aside(path) as file:
        figure.savefig(file, format="png")


def text_colour(background: Iterable[float]) -> str:
    """Black or white, whichever is legible on a colour of red, green, blue in [0, 1]."""
    red, green, blue, *_ = background
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


class HeatMap:
    """Collects the steps of a run on a mesh, and draws them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.steps = 0
        self.seconds = 0.0  # of all steps
        self.computed = np.zeros(mesh.devices)  # seconds of each rank in all steps
        self.uneven = 0.0  # seconds in which the mean rank waited for the heaviest pipeline
        self._kept: deque[tuple[float, int, Schemes, np.ndarray]] = deque(maxlen=KEPT_STEPS)

    def add(
        self,
        step: int,
        timings: imbalance.Timings,
        counts: list[int],
        seconds: float,
        strategy: Schemes = (),
    ) -> None:
        """Take in a step, with timings as :mod:`lightning_wlb.callbacks.imbalance` defines them.

        ``counts``: each pipeline's micro-batches; ``strategy``: its pipelines; () for the mesh's.
        """
        if not any(each.any() for each in timings):
            return
        # Forward + backward compute of each pipeline: [its ranks, micro_batches].
        cells = [
            each[..., imbalance.COMPUTE].sum(axis=-1).reshape(-1, each.shape[3]) for each in timings
        ]
        computed = np.concatenate([each.sum(axis=1) for each in cells])
        self.steps += 1
        self.seconds += seconds
        self.computed += computed
        self.uneven += max(float(each.sum(axis=1).mean()) for each in cells) - computed.mean()
        shown = np.concatenate(
            [
                np.where(np.arange(each.shape[1]) >= count, np.nan, each * 1e3)
                for each, count in zip(cells, counts, strict=True)
            ]
        )
        waiting = 1 - float(computed.mean()) / seconds
        self._kept.append((waiting, step, strategy, shown))

    @property
    def waiting(self) -> np.ndarray:
        """The share of all steps' time in which each rank did not compute: [ranks]."""
        return 1 - self.computed / self.seconds

    @property
    def typical(self) -> tuple[int, Schemes, np.ndarray]:
        """The step of median waiting: number, strategy, milliseconds [ranks, micro-batches].

        The milliseconds are not a number where the rank's replica has no such micro-batch.
        """
        ranked = sorted(self._kept, key=lambda kept: kept[:2])
        _, step, strategy, milliseconds = ranked[len(ranked) // 2]
        return step, strategy, milliseconds

    @property
    def advice(self) -> str:
        """A sentence on what causes most of the waiting, and what to do about it."""
        share, uneven = float(self.waiting.mean()), self.uneven / self.seconds
        begin = f"Ranks wait {share:.0%} of their time"
        if share < LITTLE:
            return f"{begin}: there is nothing to gain by balancing."
        begin += f", {uneven:.0%} for the replica with most work"
        if uneven >= share / 2:
            rest = ": compare packings with lightning-wlb plan, or give more micro_batches."
        elif self.mesh.pipeline > 1:
            rest = (
                " and the rest in the pipeline and for messages: give more micro_batches, or a"
                " shorter pipeline."
            )
        else:
            rest = (
                " and the rest for messages or other programs: give more micro_batches, or look for"
                " a mesh with lightning-wlb plan --mesh auto."
            )
        return begin + rest

    def draw(self, path: Path, title: str) -> None:
        """Write the figure as PNG, making its folder; at least one step was added before."""
        step, strategy, milliseconds = self.typical
        rows, columns = milliseconds.shape
        cells = min(max(0.55 * columns, 3.5), 8.0)
        figure = new_figure(6 + cells, 2.4 + min(0.42 * rows, 8.0))
        figure.suptitle(title, fontsize=11)
        # A letter of 10 points is about a twelfth of an inch wide.
        figure.supxlabel(fill(self.advice, int(12 * (6 + cells))), fontsize=10)
        left, right = figure.subplots(1, 2, width_ratios=(cells, 3.5))

        own = ", on pipelines of its own" if strategy else ""
        left.set_title(
            f"step {step}{own}, of median waiting:\nforward + backward in ms", fontsize=10
        )
        left.set_facecolor("0.85")
        image = left.imshow(milliseconds, cmap="cividis", vmin=0, aspect="auto")
        figure.colorbar(image, ax=left).ax.tick_params(labelsize=8)
        _annotate(left, image)
        left.set_xlabel("micro-batch, in the order in which it runs", fontsize=9)
        if columns <= MOST_LABELS:
            left.set_xticks(range(columns))

        shown = f"all {self.steps} measured steps:\ncomputing (blue), waiting (grey)"
        right.set_title(shown, fontsize=10)
        ranks, waited = np.arange(rows), self.seconds - self.computed
        right.barh(ranks, self.computed, color=COMPUTE_COLOUR)
        right.barh(ranks, waited, left=self.computed, color=WAIT_COLOUR)
        right.set_ylim(rows - 0.5, -0.5)
        right.set_xlabel("seconds", fontsize=9)
        for rank in ranks if rows <= MOST_LABELS else ():
            text = f"{self.computed[rank]:.3g} s, waits {self.waiting[rank]:.0%}"
            right.text(0, rank, f" {text}", va="center", fontsize=8)
        for axes, labels in ((left, self._rank_labels(strategy)), (right, [""] * rows)):
            axes.tick_params(labelsize=8)
            if rows <= MOST_LABELS:
                axes.set_yticks(ranks, labels)
            else:
                axes.set_ylabel("rank", fontsize=9)
        save_png(figure, path)

    def _rank_labels(self, strategy: Schemes) -> list[str]:
        """The global rank of each row, and where it stands in the step."""
        labels = []
        for index in range(self.mesh.devices):
            rank = rank_in(strategy, index) if strategy else self.mesh.coordinate(index)
            several = (axis for axis in AXES if getattr(rank.mesh, axis) > 1)
            place = ", ".join(f"{axis} {getattr(rank, axis)}" for axis in several)
            labels.append(f"rank {index}\n{place}".rstrip())
        return labels


def _annotate(axes: Axes, image: AxesImage) -> None:
    """Write each cell's number into it if there are few."""
    cells = image.get_array()
    assert cells is not None
    if max(cells.shape) > MOST_LABELS:
        return
    for (row, column), value in np.ndenumerate(np.ma.filled(cells, np.nan)):
        known = bool(np.isfinite(value))
        text = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}") if known else "none"
        colour = text_colour(image.to_rgba(value)) if known else "black"
        axes.text(column, row, text, color=colour, ha="center", va="center", fontsize=8)
