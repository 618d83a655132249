"""Meshes as a picture: what a step takes on each, and what the time is spent on.

A bar is a mesh, longest time last, in parts: arithmetic, and each thing that is none. So one sees
how far apart meshes are, and what the ones that lose lose by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lightning_wlb.callbacks.heat_map import new_figure, save_png
from lightning_wlb.mesh_search.choice import MeshChoice, MeshRow

ARITHMETIC = "#08306b"
# Told apart without colour vision and in print by lightness, in the order of the parts.
PARTS = ("#e69f00", "#8a8a8a", "#4292c6", "#cc79a7", "#56b4e9", "#fbe3a8")
LINE: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}
MOST_BARS = 30


def draw_meshes(path: Path, found: MeshChoice, reference: MeshRow | None, title: str) -> None:
    """Draw the step time on every mesh that was simulated, as PNG.

    Args:
        path: of the file; its folder is made.
        found: the answer of a search.
        reference: the best mesh of ``best_fit``, drawn as a line, if there is one.
        title: above the picture.
    """
    rows = sorted(found.rows + found.others, key=lambda row: row.step_ms)[:MOST_BARS]
    figure = new_figure(11, 2 + 0.26 * len(rows))
    axes = figure.subplots()
    names = list(rows[0].shares)
    colours = dict(zip(names, PARTS, strict=True))
    for place, row in enumerate(rows):
        lost = sum(row.shares.values())
        begin = 0.0
        for share, colour in [
            (1 - lost, ARITHMETIC),
            *((row.shares[name], colours[name]) for name in names),
        ]:
            width = max(share, 0.0) * row.step_ms
            axes.barh(place, width, left=begin, color=colour, alpha=1 if row.by_profile else 0.45)
            begin += width
        axes.text(
            row.step_ms,
            place,
            f" {row.step_ms:,.0f} ms, {row.tokens_per_second:,.0f} tokens/s,"
            f" {row.peak_bytes / 1e9:.0f} GB",
            va="center",
            fontsize=7,
        )
    axes.set_yticks(range(len(rows)), map(_label, rows), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * rows[-1].step_ms)
    axes.set_xlabel(
        "a step (ms), on average over all pipeline ranks; pale: planned by work, not by profile"
    )
    axes.set_title(title, fontsize=9, loc="left")
    handles: list[Artist] = [Patch(color=ARITHMETIC, label="arithmetic")]
    handles += [Patch(color=colours[name], label=name) for name in names]
    if reference is not None:
        axes.axvline(found.best.step_ms * reference.times(found.best), **LINE)
        label = f"best_fit on its own best mesh, {reference.sizes}"
        handles.append(Line2D([], [], **LINE, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_png(figure, path)


def _label(row: MeshRow) -> str:
    names = zip(("DP", "PP", "CP", "TP"), row.mesh.shape, strict=True)
    sizes = " ".join(f"{name} {size}" for name, size in names)
    virtual = f" ×{row.mesh.virtual_stages} stages" if row.mesh.virtual_stages > 1 else ""
    again = f", {row.recomputed:.0%} recomputed" if row.recomputed else ""
    return f"{sizes}{virtual}{again}"
