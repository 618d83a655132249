"""Draw what `make train` measured: docs/images/gain.png.

    python examples/train_stdlib.py          # writes runs/<packing>/version_*/metrics.csv
    python -m benchmarks.demo_picture        # draws the latest version of both runs

Left: in each step, how much longer the busiest data-parallel replica computed than the mean one
(``wlb/imbalance_data``), as the share of steps up to each value. Right: the first run divided by
the second, in time per token and in time per model FLOP (sums over steps). The latter leaves out
that a packing which cuts documents gives their tokens less to attend to.

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
# Okabe and Ito's blue and vermilion: told apart under every common colour blindness and in grey.
COLOURS = ("#D55E00", "#0072B2")
LINES = ("--", "-")


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


def ratios(runs: Sequence[dict[str, np.ndarray]]) -> dict[str, float]:
    """Time per token and per model FLOP of the first run over those of the second."""
    seconds = [float(run["step_seconds"].sum()) for run in runs]
    flops = [float((run["tflops_per_device"] * run["step_seconds"]).sum()) for run in runs]
    tokens = [float(run["tokens"].sum()) for run in runs]
    per_token = [time / count for time, count in zip(seconds, tokens, strict=True)]
    per_flop = [time / count for time, count in zip(seconds, flops, strict=True)]
    return {
        "time per token": per_token[0] / per_token[1],
        "time per model FLOP": per_flop[0] / per_flop[1],
    }


def draw(runs: Sequence[dict[str, np.ndarray]], names: Sequence[str], path: Path) -> None:
    """Write the picture of two runs."""
    figure = Figure(figsize=(9, 3.4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _shares(left, runs, names)
    _bars(right, ratios(runs), names)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _shares(axes: Axes, runs: Sequence[dict[str, np.ndarray]], names: Sequence[str]) -> None:
    for run, name, colour, line in zip(runs, names, COLOURS, LINES, strict=True):
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
    axes.legend(loc="lower right", frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Axes, gains: dict[str, float], names: Sequence[str]) -> None:
    bars = axes.barh(list(gains), list(gains.values()), color=COLOURS[1], height=0.5)
    axes.bar_label(bars, fmt="%.2f", padding=4, fontweight="bold")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(0, 1.2 * max(1.0, *gains.values()))
    axes.set_xlabel(f"{names[0]} / {names[1]} (above 1: {names[1]} is faster)")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, print the ratios, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of both runs")
    parser.add_argument("--packing", nargs=2, default=["original", "wlb"], help="before and after")
    parser.add_argument("--output", type=Path, default=Path("docs/images/gain.png"))
    options = parser.parse_args(arguments)
    try:
        runs = [read(options.runs / name) for name in options.packing]
    except (FileNotFoundError, ValueError) as problem:
        sys.exit(str(problem))
    for name, ratio in ratios(runs).items():
        print(f"{name}, {options.packing[0]} / {options.packing[1]}: {ratio:.3f}")
    draw(runs, options.packing, options.output)
    print(f"Picture: {options.output}")


if __name__ == "__main__":
    main()
