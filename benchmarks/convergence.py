"""Does packing change what a model learns? WLB-LLM's Figures 6 and 16 on a small scale.

    python -m benchmarks.convergence                      # about 20 minutes on one core
    python -m benchmarks.convergence --processes 2        # half of that on two
    python -m benchmarks.convergence --packings original wlb --seeds 3   # more, to the same file

The same small decoder is trained on the standard library's top-level definitions from the same
seeds, with each packing and each ``loss_normalisation``. A seed sets the initial weights and the
order of the documents, so that runs of one seed differ by their packing alone. Training runs in
one process: the gradients of a step depend on the pieces that enter it and on nothing else
(docs/design.md), so its curve is that of any mesh, and of any arrangement of a step's pieces.

Reported by tokens seen, mean and standard deviation over the seeds:

* the training loss, mean over the targets of each stretch of tokens;
* the held-out loss on documents that no run trains on, whole up to a context window, the same in
  all runs, whatever their packing cuts;
* the difference to a *control* of the same seed, which cuts documents alike and delays nothing:
  ``original`` for ``fixed_greedy`` (the stream of documents, cut every C tokens), ``auto`` for
  ``wlb`` (documents whole);
* the mean and the maximum delay in steps.

Documents end at the context window (``long_documents="truncate"``), or single ones would fill many
steps of so small a run.

What it can show: an effect of delay and of steps that are unlike each other (long pieces together,
short ones together) that is larger than the spread over the seeds. What it cannot: that there is
no effect on a large model over a long run. The model has some 10^5 parameters, a run some hundred
steps, and less than one epoch; the paper trained 550 million parameters for 52,000 steps. With the
default numbers the held-out loss is always taken where a window of ``fixed_greedy`` ends, after its
steps of short documents; ``--tokens 589824`` takes it all over the window.

Finished runs are kept in the JSON file and not repeated, so that a broken run of the benchmark goes
on, and seeds and packings can be added; runs of a packing that the package no longer has stay there
as ``removed``. Needs no quiet machine: no time is measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import report
from benchmarks.convergence_runs import (
    NORMALISATIONS,
    PACKINGS,
    Run,
    Settings,
    stdlib_documents,
    train,
)

CONTROLS = {"fixed_greedy": "original", "wlb": "auto"}
"""What a packing's loss is compared with: the same pieces, or nearly, and no delay."""

# Okabe and Ito's colours: told apart under every common colour blindness.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7")


def summarise(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over the seeds of each packing and normalisation, in the order of the runs.

    Returns:
        For each: the mean and standard deviation (ddof 1, 0 for one seed) of the final losses, the
        delays, and, where the control has run with the same seeds, the relative difference of the
        final losses to it, mean and standard deviation over the seeds, in percent.
    """
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for name, result in results.items():
        packing, normalisation, seed = name.split("/")
        groups.setdefault((packing, normalisation), {})[seed] = result
    rows = []
    for (packing, normalisation), of_seeds in groups.items():
        row: dict[str, Any] = {
            "packing": packing,
            "normalisation": normalisation,
            "seeds": len(of_seeds),
            "delay_mean": float(np.mean([each["delay_mean"] for each in of_seeds.values()])),
            "delay_max": max(each["delay_max"] for each in of_seeds.values()),
            "tokens_variation": float(
                np.mean([each["tokens_variation"] for each in of_seeds.values()])
            ),
        }
        control = groups.get((CONTROLS.get(packing, ""), normalisation), {})
        paired = sorted(of_seeds.keys() & control.keys())
        for name in ("final_training", "final_held_out"):
            row[name], row[f"{name}_spread"] = _spread([each[name] for each in of_seeds.values()])
            if paired:
                row[f"{name}_percent"], row[f"{name}_percent_spread"] = _spread(
                    [100 * (of_seeds[seed][name] / control[seed][name] - 1) for seed in paired]
                )
        rows.append(row)
    return rows


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The summary as a table."""
    headings = (
        "packing / normalisation", "seeds", "training", "held out", "training, % of control",
        "held out, % of control", "delay", "max",
    )  # fmt: skip
    cells = [
        [
            f"{row['packing']} / {row['normalisation']}",
            str(row["seeds"]),
            *(
                f"{row[name]:.3f} ± {row[name + '_spread']:.3f}"
                for name in ("final_training", "final_held_out")
            ),
            *(
                f"{row[name]:+.2f} ± {row[name + '_spread']:.2f}" if name in row else "control"
                for name in ("final_training_percent", "final_held_out_percent")
            ),
            f"{row['delay_mean']:.2f}",
            str(row["delay_max"]),
        ]
        for row in rows
    ]
    title = "Final losses, mean ± standard deviation over the seeds"
    return report.table(title, headings, cells)


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Write the picture: losses, and held-out losses less those of ``original``."""
    packings = list(dict.fromkeys(name.split("/")[0] for name in results))
    normalisations = list(dict.fromkeys(name.split("/")[1] for name in results))
    figure = Figure(figsize=(15, 4.2 * len(normalisations)), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(normalisations), 3, squeeze=False)
    for (training, held_out, difference), normalisation in zip(axes, normalisations, strict=True):
        for packing, colour in zip(packings, COLOURS, strict=False):
            of_seeds = {
                seed: results[f"{packing}/{normalisation}/{seed}"]
                for seed in _seeds(results, packing, normalisation)
            }
            control = {
                seed: results[f"original/{normalisation}/{seed}"]
                for seed in _seeds(results, "original", normalisation)
            }
            for axis, kind in ((training, "training"), (held_out, "held_out")):
                _curve(axis, [each[kind] for each in of_seeds.values()], packing, colour)
            _curve(
                difference,
                [
                    {
                        "tokens": each["held_out"]["tokens"],
                        "loss": np.subtract(
                            each["held_out"]["loss"], control[seed]["held_out"]["loss"]
                        ),
                    }
                    for seed, each in of_seeds.items()
                    if seed in control
                ],
                packing,
                colour,
            )
        training.set_ylabel(f"loss_normalisation={normalisation!r}\nnats per token")
        for axis, title in (
            (training, "training loss"),
            (held_out, "held-out loss"),
            (difference, "held-out loss less that of original, same seed"),
        ):
            axis.set_title(title)
            axis.set_xlabel("million tokens seen")
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        training.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _seeds(results: dict[str, dict[str, Any]], packing: str, normalisation: str) -> Iterator[str]:
    prefix = f"{packing}/{normalisation}/"
    return (name.removeprefix(prefix) for name in results if name.startswith(prefix))


def _curve(axis: Axes, curves: Sequence[dict[str, Any]], label: str, colour: str) -> None:
    """Mean and spread over the seeds."""
    if not curves:
        return
    tokens = np.mean([curve["tokens"] for curve in curves], axis=0) / 1e6
    losses = np.array([curve["loss"] for curve in curves])
    mean, spread = losses.mean(axis=0), losses.std(axis=0, ddof=1 if len(losses) > 1 else 0)
    axis.plot(tokens, mean, color=colour, label=label, linewidth=1.5)
    axis.fill_between(tokens, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)


def kept(path: Path, settings: Settings) -> dict[str, dict[str, Any]]:
    """The finished runs in the file, none if there is no file.

    Raises:
        ValueError: the file holds runs of other settings.
    """
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    here = asdict(settings)
    differing = [
        f"{name}={saved['settings'].get(name)!r} there, {here.get(name)!r} asked for"
        for name in {**saved["settings"], **here}
        if saved["settings"].get(name) != here.get(name)
    ]
    if differing:
        raise ValueError(
            f"{path} holds runs of other settings: {'; '.join(differing)}. Ask for the same ones,"
            " or give another --output."
        )
    results: dict[str, dict[str, Any]] = saved["runs"]
    return results


def save(path: Path, settings: Settings, results: dict[str, dict[str, Any]]) -> None:
    """Write all finished runs, sorted by packing, normalisation and seed, and their summary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = report.with_removed(
        {
            "benchmark": "convergence",
            "settings": asdict(settings),
            "summary": summarise(results),
            "runs": results,
        },
        path,
    )
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(content) + "\n")
    aside.replace(path)


def in_order(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The runs by packing, normalisation and seed, in the order of the constants above."""

    def place(name: str) -> tuple[int, int, int]:
        packing, normalisation, seed = name.split("/")
        return PACKINGS.index(packing), NORMALISATIONS.index(normalisation), int(seed)

    return {name: results[name] for name in sorted(results, key=place)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, then summarise and draw all that the file holds."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Settings()
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default 0 1 2")
    add("--tokens", type=int, default=default.tokens, help=f"of a run (default {default.tokens})")
    add("--packings", nargs="+", default=list(PACKINGS), choices=PACKINGS, help="default: all")
    add("--normalisations", nargs="+", default=list(NORMALISATIONS), choices=NORMALISATIONS)
    add("--context-window", type=int, default=default.context_window, help="C, in tokens")
    add("--processes", type=int, default=1, help="runs at a time, one core each (default 1)")
    add("--output", type=Path, default=Path(__file__).parent / "results/convergence.json",
        help="JSON file of the runs; the picture lies beside it")  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        settings = Settings(tokens=options.tokens, context_window=options.context_window)
        results = kept(options.output, settings)
    except ValueError as problem:
        sys.exit(str(problem))
    # Seed by seed, so that a broken benchmark has compared something.
    asked = [
        Run(packing, normalisation, seed)
        for normalisation, seed, packing in product(
            options.normalisations, options.seeds, options.packings
        )
    ]
    missing = [run for run in asked if run.name not in results]
    if missing:
        stdlib_documents(settings)  # tokenised once, not by every process
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console,
    )  # fmt: skip
    # Fresh processes: each run seeds everything, and torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with progress, ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        task = progress.add_task(
            "Training runs", total=len(asked), completed=len(asked) - len(missing)
        )
        runs = {pool.submit(train, settings, run): run for run in missing}
        for done in as_completed(runs):
            results[runs[done].name] = done.result()
            save(options.output, settings, in_order(results))
            progress.update(task, advance=1, description=f"Training runs ({runs[done].name})")
    results = in_order(results)
    rows = summarise(results)
    Console(width=140).print(table(rows))
    picture = options.output.with_suffix(".png")
    draw(results, picture)
    print(f"Runs: {options.output}\nPicture: {picture}")
    print(json.dumps({"benchmark": "convergence", "settings": asdict(settings), "summary": rows}))


if __name__ == "__main__":
    main()
