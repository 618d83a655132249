"""Draw what `make train` measured: docs/images/gain.png.

    python examples/train_stdlib.py          # writes runs/<packing>/version_*/metrics.csv
    python -m benchmarks.demo_picture        # draws the latest version of each run

Left: in each step, how much longer the busiest data-parallel replica computed than the mean one
(``wlb/imbalance_data``), as the share of steps up to each value. Right: the other runs divided by
the last, in time per token and in time per model FLOP (sums over steps; the ratios of the medians
over steps are printed beside them). The latter leaves out that a packing which cuts documents gives
their tokens less to attend to.

The first steps are left out, so that the ratios are those of the table that the demo prints. The
picture says how many steps it shows; measure on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

WARM_UP_STEPS = 2
# Okabe and Ito's colours, the last run blue: told apart under every common colour blindness.
COLOURS = ("#D55E00", "#E69F00", "#009E73", "#CC79A7")
LAST_COLOUR = "#0072B2"
LINES = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))


def read(folder: Path) -> dict[str, np.ndarray]:
    """Each ``wlb/...`` column of the latest version's metrics.csv over the timed steps.

    Raises:
        FileNotFoundError: if the folder holds no run.
        ValueError: if the run is too short, or its metrics are not of every step.
    """
    versions = sorted(folder.glob("version_*"), key=lambda path: int(path.name.split("_")[1]))
    if not versions:
        raise FileNotFoundError(f"{folder} holds no version_*: run examples/train_stdlib.py first.")
    path = versions[-1] / "metrics.csv"
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("wlb/step_seconds")]
    if len(rows) <= WARM_UP_STEPS:
        raise ValueError(
            f"{path} has {len(rows)} steps, but more than {WARM_UP_STEPS} are needed: train longer,"
            " with Trainer(log_every_n_steps=1)."
        )
    timed = rows[WARM_UP_STEPS:]
    names = [name for name in timed[0] if name.startswith("wlb/")]
    return {name[4:]: np.array([float(row[name]) for row in timed]) for name in names}


def ratios(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> dict[str, float]:
    """Time per token and per model FLOP of a run over those of another: of all, of the median."""
    times = []
    for run in (before, after):
        seconds, rate = run["step_seconds"], run["tflops_per_device"]
        times.append(
            {
                "time per token": seconds.sum() / run["tokens"].sum(),
                "time per model FLOP": seconds.sum() / (rate * seconds).sum(),
                "time per token, median step": np.median(seconds / run["tokens"]),
                "time per model FLOP, median step": np.median(1 / rate),
            }
        )
    return {name: float(value / times[1][name]) for name, value in times[0].items()}


def draw(runs: Sequence[dict[str, np.ndarray]], names: Sequence[str], path: Path) -> None:
    """Write the picture of the runs, of which the last is what the others are compared with."""
    figure = Figure(figsize=(10, 3.6), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _shares(left, runs, names)
    _bars(right, runs, names)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _shares(axes: Axes, runs: Sequence[dict[str, np.ndarray]], names: Sequence[str]) -> None:
    last = len(runs) - 1
    colours, lines = [*COLOURS[:last], LAST_COLOUR], [*LINES[:last], "-"]
    for run, name, colour, line in zip(runs, names, colours, lines, strict=True):
        values = np.sort(run["imbalance_data"])
        share = np.arange(1, len(values) + 1) / len(values)
        axes.step(
            np.concatenate(([1.0], values)),
            100 * np.concatenate(([0.0], share)),
            where="post",
            color=colour,
            linestyle=line,
            linewidth=2,
            label=f"{name}: mean {values.mean():.2f} over {len(values)} steps",
        )
    axes.set_xlim(left=1.0)
    axes.set_ylim(0, 102)
    axes.set_xlabel("compute of the busiest replica / mean of the replicas (1 = balanced)")
    axes.set_ylabel("steps up to here (%)")
    axes.legend(loc="lower right", facecolor="white", framealpha=0.9, edgecolor="none")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Axes, runs: Sequence[dict[str, np.ndarray]], names: Sequence[str]) -> None:
    kinds = ("time per token", "time per model FLOP")
    height, longest = 0.8 / (len(runs) - 1), 1.0
    for index, (run, name, colour) in enumerate(zip(runs[:-1], names, COLOURS, strict=False)):
        gains = ratios(run, runs[-1])
        values = [gains[kind] for kind in kinds]
        longest = max(longest, *values)
        places = [place + (index + 0.5) * height - 0.4 for place in range(len(kinds))]
        bars = axes.barh(places, values, color=colour, height=0.9 * height)
        axes.bar_label(bars, [f"{value:.2f}  {name}" for value in values], padding=4)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(0, 1.6 * longest)
    axes.set_xlabel(f"relative to {names[-1]} (above 1: {names[-1]} is faster)")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, print the ratios, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--packing", nargs="+", default=["original", "best_fit", "auto"],
                        help="the others and, last, what they are compared with")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("docs/images/gain.png"))
    options = parser.parse_args(arguments)
    if not 2 <= len(options.packing) <= len(COLOURS) + 1:
        parser.error(f"--packing takes 2 to {len(COLOURS) + 1} methods, got {options.packing}")
    try:
        runs = [read(options.runs / name) for name in options.packing]
    except (FileNotFoundError, ValueError) as problem:
        sys.exit(str(problem))
    for packing, run in zip(options.packing[:-1], runs, strict=False):
        for name, ratio in ratios(run, runs[-1]).items():
            print(f"{name}, {packing} / {options.packing[-1]}: {ratio:.3f}")
    draw(runs, options.packing, options.output)
    print(f"Picture: {options.output}")


if __name__ == "__main__":
    main()
