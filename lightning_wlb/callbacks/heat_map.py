"""The heat map of a run: which ranks compute how long in which micro-batch.

A heavy micro-batch stands at another place in every step, so a plain mean over steps would look
balanced whatever the imbalance. Therefore there are two panels. One shows a real step, that of
median imbalance among the last ones, in milliseconds by rank and micro-batch. The other shows the
sum of all steps relative to even work, each step sorted before it is added: the heaviest replica
first, and within it the heaviest micro-batch first. The colours differ in lightness, so they read
without colour vision and in print.

Cost: numbers of ranks × micro-batches for the sum and for each of the last steps kept.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from lightning_wlb.callbacks import imbalance
from lightning_wlb.callbacks.drawing import new_figure, save_png, text_colour
from lightning_wlb.mesh import AXES, Mesh

KEPT_STEPS = 64
"""Last steps from which the one of median imbalance is shown."""

MOST_LABELS = 16
"""Rows and columns up to which each is labelled, and its cells have numbers."""


class HeatMap:
    """Collects the steps of a run on a mesh, and draws them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.steps = 0
        self._sum = np.zeros((mesh.devices, 0))
        self._even = 0.0
        self._kept: deque[tuple[float, int, np.ndarray]] = deque(maxlen=KEPT_STEPS)

    def add(self, step: int, seconds: np.ndarray, counts: list[int], slots: int) -> None:
        """Take in a step.

        Args:
            step: its number.
            seconds: its timings array, see :mod:`lightning_wlb.callbacks.imbalance`.
            counts: micro-batches of each replica.
            slots: K of the pipeline level.
        """
        if not seconds.any():
            return
        work = imbalance.micro_batch_seconds(seconds)
        # [data, the replica's ranks, micro_batches]: forward + backward compute.
        cells = seconds[..., imbalance.COMPUTE].sum(axis=-1).reshape(len(work), -1, work.shape[1])
        self._add_sorted(cells, work, slots)
        absent = np.arange(work.shape[1]) >= np.array(counts)[:, None]
        shown = np.where(absent[:, None], np.nan, cells * 1e3)
        # Both levels count: a step is typical if its slowest place is.
        levels = imbalance.pipeline_level(work, slots), imbalance.data_level(work)
        degree = max(level.degree for level in levels)
        self._kept.append((degree, step, shown.reshape(-1, work.shape[1])))

    def _add_sorted(self, cells: np.ndarray, work: np.ndarray, slots: int) -> None:
        order = np.argsort(-work, axis=1, kind="stable")
        cells = np.take_along_axis(cells, order[:, None], axis=2)
        cells = cells[np.argsort(-work.sum(axis=1), kind="stable")].reshape(-1, work.shape[1])
        even = cells.sum() / (self.mesh.devices * slots / self.mesh.data)
        missing = cells.shape[1] - self._sum.shape[1]
        self._sum = np.pad(self._sum, ((0, 0), (0, max(missing, 0))))
        self._sum[:, : cells.shape[1]] += cells
        self._even += even
        self.steps += 1

    @property
    def relative(self) -> np.ndarray:
        """[ranks, micro-batches], sorted as the module says; 1 where all work is even."""
        return self._sum / self._even

    @property
    def typical(self) -> tuple[int, np.ndarray]:
        """Number of the step of median imbalance, and its milliseconds [ranks, micro-batches].

        The milliseconds are not a number where the rank's replica has no such micro-batch.
        """
        ranked = sorted(self._kept, key=lambda kept: kept[:2])
        _, step, milliseconds = ranked[len(ranked) // 2]
        return step, milliseconds

    def draw(self, path: Path, title: str) -> None:
        """Write the figure as PNG, making its folder; does nothing if no step was taken in."""
        if not self.steps:
            return
        step, milliseconds = self.typical
        rows, columns = self.relative.shape
        width = 4.2 + 2 * min(max(0.55 * columns, 2.2), 8.0)
        height = 1.9 + min(max(0.42 * rows, 1.4), 8.0)
        figure = new_figure(width, height)
        figure.suptitle(title, fontsize=11)
        left, right = figure.subplots(1, 2)

        left.set_title(f"step {step}, of median imbalance: compute in ms", fontsize=10)
        left.set_facecolor("0.85")
        image = left.imshow(milliseconds, cmap="cividis", vmin=0, aspect="auto")
        _colour_bar(figure, left, image, "forward + backward (ms)")
        _annotate(left, image, "{:.3g}")
        left.set_xlabel("micro-batch, in the order in which it runs", fontsize=9)
        _ticks(left, self._rank_labels(), "rank")

        right.set_title(f"sum of {self.steps} steps, heaviest first in each", fontsize=10)
        # The scale ends at 2 or above, so that balanced and unbalanced runs look different.
        norm = TwoSlopeNorm(1.0, 0.0, max(2.0, float(self.relative.max())))
        image = right.imshow(self.relative, cmap="RdBu_r", norm=norm, aspect="auto")
        bar = _colour_bar(figure, right, image, "relative to even work (1 = balanced)")
        bar.ax.set_yscale("linear")
        _annotate(right, image, "{:.2f}")
        right.set_xlabel("micro-batch of the replica, heaviest first", fontsize=9)
        _ticks(right, self._place_labels(), "ranks of the heaviest replica first, lightest last")
        save_png(figure, path)

    def _rank_labels(self) -> list[str]:
        """For each row of the first panel the global rank and where it stands on the mesh."""
        indices = range(self.mesh.devices)
        return [f"rank {index}\n{self._place(index, AXES)}".rstrip() for index in indices]

    def _place_labels(self) -> list[str]:
        """Likewise for the second panel, whose replicas are sorted by their work."""
        labels = []
        for index in range(self.mesh.devices):
            lines = [self._place(index, AXES[1:])]
            if self.mesh.data > 1:
                lines.insert(0, _place_name(self.mesh.coordinate(index).data, self.mesh.data))
            labels.append("\n".join(filter(None, lines)) or "rank 0")
        return labels

    def _place(self, index: int, axes: tuple[str, ...]) -> str:
        """``context 1, tensor 0``: where a rank stands on those axes that have several ranks."""
        rank = self.mesh.coordinate(index)
        several = (axis for axis in axes if getattr(self.mesh, axis) > 1)
        return ", ".join(f"{axis} {getattr(rank, axis)}" for axis in several)


def _place_name(place: int, replicas: int) -> str:
    if place == 0:
        return "heaviest replica"
    if place == replicas - 1:
        return "lightest replica"
    return f"{('2nd', '3rd')[place - 1] if place < 3 else f'{place + 1}th'} replica"


def _colour_bar(figure: Figure, axes: Axes, image: AxesImage, label: str) -> Colorbar:
    bar = figure.colorbar(image, ax=axes)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return bar


def _ticks(axes: Axes, labels: list[str], name: str) -> None:
    """Label each row and column if there are few, else leave matplotlib's own spacing."""
    axes.tick_params(labelsize=8)
    if len(labels) <= MOST_LABELS:
        axes.set_yticks(range(len(labels)), labels)
    else:
        axes.set_ylabel(name, fontsize=9)
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
        axes.text(
            column,
            row,
            form.format(value) if known else "none",
            color=text_colour(image.to_rgba(value)) if known else "black",
            ha="center",
            va="center",
            fontsize=8,
        )
