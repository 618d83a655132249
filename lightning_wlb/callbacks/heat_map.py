"""The heat map of a run: how long each rank computes in each micro-batch; and how to draw figures.

A heavy micro-batch stands at another place in every step, so a plain mean over steps would look
balanced whatever the imbalance. Therefore there are two panels. One shows a real step, that of
median imbalance among the last ones, in milliseconds by rank and micro-batch. The other shows the
sum of all steps relative to even work, each step sorted before it is added: the heaviest replica
first, and within it the heaviest micro-batch first. The colours differ in lightness, so that they
can be read without colour vision and in print.

A row is a rank, whatever pipeline it is in: a step may leave the mesh for pipelines with different
numbers of ranks. The heaviest pipeline is then the one whose ranks have most to do each.

Figures are drawn with matplotlib's objects and not with pyplot, so that they need no display and
leave no global state behind.

Cost: ranks × micro-batches numbers for the sum and for each of the last steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from lightning_wlb.callbacks import imbalance
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.plan import Schemes, rank_in

KEPT_STEPS = 64
"""Last steps from which the one of median imbalance is shown."""

MOST_LABELS = 16
"""Up to so many rows or columns, each is labelled and its cells have numbers."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, at 150 dots per inch."""
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure, making the folder of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def text_colour(background: Iterable[float]) -> str:
    """Black or white, whichever is legible on a colour of red, green, blue in [0, 1]."""
    red, green, blue, *_ = background
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


class HeatMap:
    """Collects the steps of a run on a mesh, and draws them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.steps = 0
        self._sum = np.zeros((mesh.devices, 0))
        self._even = 0.0
        self._kept: deque[tuple[float, int, Schemes, np.ndarray]] = deque(maxlen=KEPT_STEPS)

    def add(
        self,
        step: int,
        timings: imbalance.Timings,
        counts: list[int],
        slots: float,
        strategy: Schemes = (),
    ) -> None:
        """Take in a step.

        Args:
            step: its number.
            timings: as :mod:`lightning_wlb.callbacks.imbalance` defines them.
            counts: micro-batches of each pipeline.
            slots: K of the pipeline level.
            strategy: the step's own pipelines; empty on the mesh.
        """
        if not any(each.any() for each in timings):
            return
        # Forward + backward compute of each pipeline: [its ranks, micro_batches].
        cells = [
            each[..., imbalance.COMPUTE].sum(axis=-1).reshape(-1, each.shape[3]) for each in timings
        ]
        self._add_sorted(cells, imbalance.micro_batch_seconds(timings), timings, slots)
        shown = np.concatenate(
            [
                np.where(np.arange(each.shape[1]) >= count, np.nan, each * 1e3)
                for each, count in zip(cells, counts, strict=True)
            ]
        )
        # A step is as typical as its worse level.
        levels = imbalance.measured_imbalance(timings, slots)
        degree = max(levels.pipeline.degree, levels.data.degree)
        self._kept.append((degree, step, strategy, shown))

    def _add_sorted(
        self, cells: list[np.ndarray], work: np.ndarray, timings: imbalance.Timings, slots: float
    ) -> None:
        order = np.argsort(-work, axis=1, kind="stable")
        per_stage = work.sum(axis=1) / [len(each) for each in timings]
        heaviest = np.argsort(-per_stage, kind="stable")
        added = np.concatenate([cells[at][:, order[at]] for at in heaviest])
        missing = max(added.shape[1] - self._sum.shape[1], 0)
        self._sum = np.pad(self._sum, ((0, 0), (0, missing)))
        self._sum[:, : added.shape[1]] += added
        self._even += added.sum() / (self.mesh.devices * slots / len(cells))
        self.steps += 1

    @property
    def relative(self) -> np.ndarray:
        """[ranks, micro-batches], sorted as the module says; 1 where all work is even."""
        return self._sum / self._even

    @property
    def typical(self) -> tuple[int, Schemes, np.ndarray]:
        """The step of median imbalance: number, strategy, milliseconds [ranks, micro-batches].

        The milliseconds are not a number where the rank's replica has no such micro-batch.
        """
        ranked = sorted(self._kept, key=lambda kept: kept[:2])
        _, step, strategy, milliseconds = ranked[len(ranked) // 2]
        return step, strategy, milliseconds

    def draw(self, path: Path, title: str) -> None:
        """Write the figure as PNG, making its folder; do nothing if no step was taken in."""
        if not self.steps:
            return
        step, strategy, milliseconds = self.typical
        rows, columns = self.relative.shape
        width = 4.2 + 2 * min(max(0.55 * columns, 2.2), 8.0)
        height = 1.9 + min(max(0.42 * rows, 1.4), 8.0)
        figure = new_figure(width, height)
        figure.suptitle(title, fontsize=11)
        left, right = figure.subplots(1, 2)

        own = ", on pipelines of its own" if strategy else ""
        left.set_title(f"step {step}{own}, of median imbalance: compute in ms", fontsize=10)
        left.set_facecolor("0.85")
        image = left.imshow(milliseconds, cmap="cividis", vmin=0, aspect="auto")
        _colour_bar(figure, left, image, "forward + backward (ms)")
        _annotate(left, image, "{:.3g}")
        left.set_xlabel("micro-batch, in the order in which it runs", fontsize=9)
        _ticks(left, self._rank_labels(strategy), "rank")

        right.set_title(f"sum of {self.steps} steps, heaviest first in each", fontsize=10)
        # The scale ends at 2 or above, so that balanced and unbalanced runs look different.
        norm = TwoSlopeNorm(1.0, 0.0, max(2.0, float(self.relative.max())))
        image = right.imshow(self.relative, cmap="RdBu_r", norm=norm, aspect="auto")
        bar = _colour_bar(figure, right, image, "relative to even work (1 = balanced)")
        bar.ax.set_yscale("linear")
        _annotate(right, image, "{:.2f}")
        right.set_xlabel("micro-batch of the replica, heaviest first", fontsize=9)
        _ticks(right, [], "ranks of the heaviest replica first, lightest last")
        save_png(figure, path)

    def _rank_labels(self, strategy: Schemes) -> list[str]:
        """Rows of the first panel: the global rank and where it stands in the step."""
        labels = []
        for index in range(self.mesh.devices):
            rank = rank_in(strategy, index) if strategy else self.mesh.coordinate(index)
            several = (axis for axis in AXES if getattr(rank.mesh, axis) > 1)
            place = ", ".join(f"{axis} {getattr(rank, axis)}" for axis in several)
            labels.append(f"rank {index}\n{place}".rstrip())
        return labels


def _colour_bar(figure: Figure, axes: Axes, image: AxesImage, label: str) -> Colorbar:
    bar = figure.colorbar(image, ax=axes)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return bar


def _ticks(axes: Axes, labels: list[str], name: str) -> None:
    """Label each row and column if there are few; rows without labels have the axis' name."""
    axes.tick_params(labelsize=8)
    if 0 < len(labels) <= MOST_LABELS:
        axes.set_yticks(range(len(labels)), labels)
    else:
        axes.set_ylabel(name, fontsize=9)
    if not labels:
        axes.set_yticks([])
    columns = round(axes.get_xlim()[1] + 0.5)
    if columns <= MOST_LABELS:
        axes.set_xticks(range(columns))


def _annotate(axes: Axes, image: AxesImage, form: str) -> None:
    """Write each cell's number into it if there are few."""
    cells = image.get_array()
    assert cells is not None
    if max(cells.shape) > MOST_LABELS:
        return
    for (row, column), value in np.ndenumerate(np.ma.filled(cells, np.nan)):
        known = bool(np.isfinite(value))
        text = form.format(value) if known else "none"
        colour = text_colour(image.to_rgba(value)) if known else "black"
        axes.text(column, row, text, color=colour, ha="center", va="center", fontsize=8)
