"""What `make train` shows, several times over; and docs/images/gain.png, drawn from it.

    python -m benchmarks.demo              # three runs, 12 minutes
    python -m benchmarks.demo --runs 0     # draws the kept result again

A run is ``examples/train_stdlib.py`` as anybody starts it, a process of its own. Kept of it are, of
every round, the times of each packing over those of the last one, per token and per model FLOP,
and the share of its time that a process waits for the busiest one. Absolute times are not: they
are this machine's. ``crowded`` is the share of time in which a process was ready to run and had no
core, at the median; above a few percent other programs were running, and the times say little.

Picture: bars are medians over the rounds of all runs, dots the single rounds.

Prints what the guide says of the runs, and as its last line the JSON object that it writes. Needs
a core per process (two) and nothing else running.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples/train_stdlib.py"
TIMES = {"per_token": "microseconds_per_token", "per_flop": "seconds_per_tflop"}
PANELS = {
    "waiting": "time a core spends waiting\nfor the busier one (%)",
    "per_token": "time per token\n({last} = 1)",
    "per_flop": "time for equal work\n(per FLOP, {last} = 1)",
}
ROWS = {
    "original": "original\n(cut at the window)",
    "best_fit": "best_fit\n(whole documents)",
    "auto": "auto\n(equal work)",
}
MOST_CROWDED = 0.05
# Okabe and Ito's colours: told apart under every common colour blindness.
COLOURS = ("#D55E00", "#E69F00", "#009E73", "#CC79A7")
LAST_COLOUR = "#0072B2"


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """One run of the demo, shown as it goes; what :func:`by_round` keeps of it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(DEMO), "--output", folder, *arguments]
        subprocess.run(command, check=True)
        return by_round(json.loads((Path(folder) / "figures.json").read_text()))


def by_round(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios and waits of every round, of the demo's ``figures.json``."""
    rounds = figures["rounds"]
    last = rounds[list(rounds)[-1]]
    result: dict[str, Any] = {
        "rounds": len(last),
        "crowded": round(median(each["crowded"] for of in rounds.values() for each in of), 4),
    }
    for packing, of in rounds.items():
        result[packing] = {"waiting": [round(each["waiting"], 4) for each in of]}
        for name, key in TIMES.items():
            pairs = zip(of, last, strict=True)
            result[packing][name] = [round(own[key] / other[key], 4) for own, other in pairs]
    return result


def summary(runs: Sequence[Mapping[str, Any]], packings: Sequence[str]) -> dict[str, Any]:
    """The median of every run for each packing and figure, and the extremes of all rounds."""
    result: dict[str, Any] = {}
    for packing in packings:
        result[packing] = {}
        for name in PANELS:
            every = pooled(runs, packing, name)
            result[packing][name] = {
                "medians_of_runs": [round(median(each[packing][name]), 4) for each in runs],
                "median_of_rounds": round(median(every), 4),
                "least_round": min(every),
                "most_round": max(every),
            }
    return result


def pooled(runs: Sequence[Mapping[str, Any]], packing: str, name: str) -> list[float]:
    """The rounds of all runs."""
    return [value for each in runs for value in each[packing][name]]


def caption(result: Mapping[str, Any]) -> str:
    """What the guide says of the runs."""
    *others, last = result["packings"]
    of = result["summary"]
    rounds = _range([each["rounds"] for each in result["runs"]], "d")
    compared = []
    for name, kind in (("per token", "per_token"), ("for equal work", "per_flop")):
        each = [
            f"`{packing}` {_range(of[packing][kind]['medians_of_runs'], '.2f')} times (rounds"
            f" {of[packing][kind]['least_round']:.2f} to {of[packing][kind]['most_round']:.2f})"
            for packing in others
        ]
        compared.append(f"{name}, {' and '.join(each)}")
    waits = [
        f"{100 * of[packing]['waiting']['median_of_rounds']:.0f} % with `{packing}`"
        for packing in result["packings"]
    ]
    crowded = [each["crowded"] for each in result["runs"]]
    shared = ""
    if max(crowded) > MOST_CROWDED:
        share = _range([100 * each for each in crowded], ".0f")
        shared = (
            f" Other programs were running: a process was without a core {share} % of its time."
        )
    return (
        f"Medians of {len(result['runs'])} runs of {rounds} rounds, as multiples of `{last}`'s"
        f" time: {'; '.join(compared)}. Of its time a core waited for the busier one"
        f" {', '.join(waits)}.{shared}"
    )


def _range(values: Sequence[float], form: str) -> str:
    """``1.05 to 1.09``, or one number where they are the same."""
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture."""
    packings, runs = result["packings"], result["runs"]
    figure = Figure(figsize=(10, 1.0 + 0.62 * len(packings)), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (name, title) in zip(all_axes, PANELS.items(), strict=True):
        _bars(axes, runs, packings, name)
        axes.set_title(title.format(last=packings[-1]), fontsize=11)
    all_axes[0].invert_yaxis()  # of all three
    rounds = sum(each["rounds"] for each in runs)
    figure.supxlabel(
        f"bars: medians of {rounds} rounds, in {len(runs)} runs of the demo; dots: the rounds",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _bars(
    axes: Axes, runs: Sequence[Mapping[str, Any]], packings: Sequence[str], name: str
) -> None:
    factor, form = (100, "{:.0f} %") if name == "waiting" else (1, "{:.2f}")
    colours = (*COLOURS[: len(packings) - 1], LAST_COLOUR)
    longest = 0.0
    for place, (packing, colour) in enumerate(zip(packings, colours, strict=True)):
        values = [factor * value for value in pooled(runs, packing, name)]
        longest = max(longest, *values)
        axes.barh(place, median(values), color=colour, height=0.6, alpha=0.85)
        if min(values) < max(values):
            axes.plot(values, [place] * len(values), "o", color="black", markersize=3, alpha=0.35)
        label = form.format(median(values))
        axes.text(max(values), place, f"  {label}", va="center", fontsize=11, fontweight="bold")
    axes.set_yticks(range(len(packings)), [ROWS.get(each, each) for each in packings], fontsize=10)
    axes.set_xlim(0, 1.25 * longest)
    if name != "waiting":
        axes.axvline(1, color="black", linewidth=1)
    axes.spines[["top", "right"]].set_visible(False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Further options are the demo's own: --rounds, --seconds, --packing, ...",
    )
    add = parser.add_argument
    add("--runs", type=int, default=3, help="0: draw what --result holds")
    add("--result", type=Path, default=Path(__file__).parent / "results/demo.json")
    add("--picture", type=Path, default=ROOT / "docs/images/gain.png")
    options, of_demo = parser.parse_known_args(arguments)
    if options.runs > 0:
        runs = [run(of_demo) for _ in range(options.runs)]
        packings = [name for name in runs[0] if name not in ("rounds", "crowded")]
        result = {
            "benchmark": "demo",
            "command": " ".join(["python -m benchmarks.demo", f"--runs {len(runs)}", *of_demo]),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "packings": packings,
            "summary": summary(runs, packings),
            "runs": runs,
        }
        options.result.write_text(json.dumps(result, indent=1) + "\n")
    result = json.loads(options.result.read_text())
    draw(result, options.picture)
    print(caption(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
