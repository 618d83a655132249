"""What the pictures share: an empty figure, its PNG file, and text that is legible on a colour.

Pictures are drawn with matplotlib's objects and not with pyplot, so that they need no display and
leave no global state behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, at 150 dots per inch."""
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure; the folder of the file is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def text_colour(background: Iterable[float]) -> str:
    """Black or white, whichever is legible on a colour of red, green, blue in [0, 1]."""
    red, green, blue, *_ = background
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
