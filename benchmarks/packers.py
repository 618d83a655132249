"""What a step takes with other people's packers, by their own code, and with ours, on one profile.

A window of 131,072 tokens and 16 windows a step, models and clusters as the tables say. The step
is simulated from one device profile, on this package's executor: only the packing is theirs. Every
packer gets every data × pipeline × context × tensor mesh of powers of two that its own code can
serve several limits of tokens, and of no, selective
and full recomputation the least that fits in memory in all steps, and the fastest of these counts.
The sharding over context-parallel ranks is the one that its framework has. Ours is ``auto`` as a
user gets it with a profile: the mesh that the search chooses and each micro-batch's own
recomputation. It plans by the profile that also judges it, and others by a formula of their own, so
it is there once more planned by exact work; and once more without a pipeline, as several others
have none. Stages are not virtual, and communication overlaps with nothing, for nobody. Times are
per FLOP of the model, as packers that cut documents do less work for a token.

Torch's own balancers of context parallelism deal the tokens of a micro-batch, not documents, so
they are compared apart: windows cut from the concatenated documents, time of a
layer, against the sharding that ``adaptive`` chooses.

*Attention anywhere* is what could be gained at most by sending attention to whichever rank is free
(the idea of DistCA, arXiv:2510.18121).

All is kept in ``results/packers.json``. What made it (this file, ``packers_runs.py``
and ``peer_steps.py``, with verl 0.9.1, trl 1.16.0, megatron-core 0.16.1 and clones of Megatron-LM,
slime and DistCA) was last in commit 128ffc7a. ``python -m benchmarks.packers`` prints the page, and
writes it and its picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import report

OURS, BY_WORK, ALONE = "auto", "auto, by exact work", "auto, no pipeline"
BOUND = "attention anywhere (bound)"
HEADINGS = ("packer", "time / auto", "mesh d,p,c,t", "limit", "s / step", "waits", "keys",
    "recomputed", "of it", "GB", "code")  # fmt: skip
MARKS = "osD^vP"


def times_ours(kept: Mapping[str, Any]) -> dict[str, float]:
    """Time per FLOP over that of ``auto``, of the rows of a setting that have one."""
    key = "ns_per_gigaflop"
    return {name: row[key] / kept[OURS][key] for name, row in kept.items() if key in row}


def tables(result: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Title, headings and rows of each table, fastest first."""
    for setting, kept in result["settings"].items():
        times = times_ours(kept)
        rows = [
            [
                name, f"{times[name]:.2f}", kept[name]["mesh"], str(kept[name]["limit"] or ""),
                f"{kept[name]['step_ms'] / 1e3:.2f}",
                *(f"{kept[name][share]:.0%}" for share in ("idle", "keys", "again")),
                kept[name]["recompute"], f"{kept[name]['gigabytes']:.0f}", kept[name]["source"],
            ]
            for name in sorted(times, key=lambda name: times[name])
        ]  # fmt: skip
        rows += [
            [name, row["word"], *[""] * (len(HEADINGS) - 2)]
            for name, row in kept.items() if "word" in row
        ]  # fmt: skip
        yield setting, HEADINGS, rows
    rows = [
        [
            setting,
            ranks,
            *(f"{row[way]:.2f}" for way in ("head_tail", "ptrr")),
            f"{row['waits']:.1%}",
        ]
        for setting, kept in result["settings"].items()
        for ranks, row in kept.get("torch", {}).items()
    ]
    headings = ("documents", "context ranks", "head-tail / adaptive", "PTRR / adaptive",
        "adaptive waits")  # fmt: skip
    yield "Torch's balancers of context parallelism: time of a layer", headings, rows


def page(result: Mapping[str, Any]) -> str:
    """The tables with what they mean."""
    lines = [
        "# Other people's packers, by their own code",
        "",
        "Made by `python -m benchmarks.packers`; do not edit. Everything is *simulated*,"
        f" {result['provenance']}; {result['steps']} steps of each setting, 16 windows of 131,072"
        " tokens a step. Every packer has the fastest mesh and limit that its own code can serve"
        " and that fits, on this package's executor. `time / auto` is per FLOP of the model."
        " `waits` is the share of the devices' time without work, `keys` that of exchanging keys"
        " between context-parallel ranks, `recomputed` that of computing again (`of it`: what)."
        " A limit is in tokens of a micro-batch, or a number of micro-batches, rows or documents"
        " where the packer takes one.",
    ]
    for title, headings, rows in tables(result):
        lines += ["", f"## {title}", "", *report.markdown_table(headings, rows)]
    return "\n".join(lines) + "\n"


def picture(result: Mapping[str, Any], path: Path) -> None:
    """Time over that of ``auto``: a line for each packer, a mark for each setting."""
    every = {setting: times_ours(kept) for setting, kept in result["settings"].items()}
    names = {name for times in every.values() for name in times} - {OURS}

    def mean(name: str) -> float:
        found = [times[name] for times in every.values() if name in times]
        return sum(found) / len(found)

    order = sorted(names, key=mean, reverse=True)
    figure, panel = plt.subplots(figsize=(9, 0.3 * len(order) + 1.7), layout="constrained")
    for (setting, times), mark in zip(every.items(), MARKS, strict=False):
        places = [at for at, name in enumerate(order) if name in times]
        panel.plot([times[order[at]] for at in places], places, mark, label=setting, alpha=0.8)
    panel.axvline(1, color="black", linewidth=1)
    panel.set_yticks(range(len(order)), order)
    panel.grid(axis="x", alpha=0.4)
    panel.set(xlabel=f"simulated time per FLOP over that of auto ({result['profile']})")
    figure.legend(fontsize=8, loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    report.write_page("packers", __doc__, page, argv, picture)


if __name__ == "__main__":
    main()
