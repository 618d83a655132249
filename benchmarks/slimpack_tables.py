"""What the figures of benchmarks/slimpack.py come to: targets, ratios, tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.slimpack_plans import RANKS

UNSLICED = ("original", "best_fit", "unsliced", "tapered, no delay")
DELAYED = ("wlb", "balanced", "tapered")
COLUMNS = {
    "method": "method",
    "step": "T/S",
    "step_p99": "p99",
    "step_overhead": "with overhead",
    "step_interleaved": "interleaved",
    "imbalance": "imbalance",
    "imbalance_forward": "forward",
    "imbalance_backward": "backward",
    "cuts": "cuts",
    "micro_batches": "M",
    "open_tokens": "open (C)",
    "open_tokens_max": "max",
    "delay": "delay",
    "ms_per_plan": "ms",
}


class Target(NamedTuple):
    """What a figure should be at most, and what it is."""

    name: str
    bound: float
    found: float

    @property
    def met(self) -> bool:
        return self.found <= self.bound


def targets(rows: dict[str, dict[str, Any]]) -> list[Target]:
    """Those that the rows present decide; keys are "N/method"."""
    wanted = {
        "4/slim 2·N": {"step": 1.385, "step_overhead": 1.40, "imbalance": 1.005, "cuts": 7},
        "4/slim 4·N": {
            "step": 1.20,
            "step_overhead": 1.22,
            "imbalance": 1.005,
            "cuts": 7,
            "ms_per_plan": 1,
        },
        "16/slim 4·N": {"imbalance": 1.005},
        "4/asymmetric 4·N": {"imbalance_forward": 1.01, "imbalance_backward": 1.01, "cuts": 13},
    }
    return [
        Target(f"{key}: {name}", bound, rows[key][name])
        for key, bounds in wanted.items()
        if key in rows
        for name, bound in bounds.items()
    ]


def ratios(rows: dict[str, dict[str, Any]], count: int) -> dict[str, dict[str, Any]]:
    """Slices over the best whole-piece method, without and with delay, for both schedules.

    ``floor`` is what a step without any bubble would reach.
    """
    result = {}
    for figure in ("step", "step_interleaved"):
        for label, names in (("no delay", UNSLICED), ("any delay", UNSLICED + DELAYED)):
            best = min((rows[f"{count}/{name}"] for name in names), key=lambda row: row[figure])
            result[f"{count}/{figure}, {label}"] = {
                "best": best["method"],
                "floor": 1 / best[figure],
                **{
                    name: rows[f"{count}/{name}"][figure] / best[figure]
                    for name in ("slim 4·N", "slim 4·N, tapered", "auto")
                },
            }
    return result


def cells(row: dict[str, Any]) -> list[str]:
    values = (row[name] for name in COLUMNS)
    return ["" if v is None else v if isinstance(v, str) else f"{v:.4g}" for v in values]


def show(result: dict[str, Any], console: Console) -> None:
    """The tables of a run."""
    for count in result["micro_batches"]:
        table = Table(title=f"Generator A, N = {count}, PP {RANKS}, simulated")
        for title in COLUMNS.values():
            table.add_column(title, justify="left" if title == "method" else "right")
        for key, row in result["rows"].items():
            if key.startswith(f"{count}/"):
                table.add_row(*cells(row))
        console.print(table)
    for name in ("slices over the best unsliced", "by_replicas", "merges", "integer_program"):
        console.print(name, result[name])
    for target in result["targets"]:
        console.print("{name}: {found:.4f}, at most {bound}: {met}".format(**target))


def markdown(result: dict[str, Any]) -> str:
    """The same as a page."""
    lines = ["# Slices on Generator A, simulated", "", "See `benchmarks/slimpack.py`.", ""]

    def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        for row in (titles, ["---"] * len(titles), *rows):
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")

    for count in result["micro_batches"]:
        lines.extend([f"## N = {count}, PP {RANKS}, {len(result['seeds'])} seeds", ""])
        rows = [row for key, row in result["rows"].items() if key.startswith(f"{count}/")]
        table(list(COLUMNS.values()), [cells(row) for row in rows])
    lines.extend(["## Targets", ""])
    table(
        ("figure", "at most", "found", "met"),
        [
            (each["name"], f"{each['bound']:g}", f"{each['found']:.4f}", str(each["met"]))
            for each in result["targets"]
        ],
    )
    lines.extend(["## Slices over the best method that keeps pieces whole", ""])
    of = result["slices over the best unsliced"]
    names = list(next(iter(of.values())))
    table(
        ["N, figure", *names],
        [
            [key, *(v if isinstance(v, str) else f"{v:.4f}" for v in row.values())]
            for key, row in of.items()
        ],
    )
    return "\n".join(lines).rstrip() + "\n"
