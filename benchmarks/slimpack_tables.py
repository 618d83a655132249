"""What the figures of benchmarks/slimpack.py come to: targets, ratios, tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks import report
from benchmarks.packing_runs import STAGES

UNSLICED = ("original", "best_fit", "unsliced")
DELAYED = ("wlb",)
SLICED = ("slim 4·N", "slim 4·N, tapered", "auto")
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
TARGETS = {  # row: figures, at most
    "4/slim 2·N": {"step": 1.385, "step_overhead": 1.40, "imbalance": 1.005, "cuts": 7},
    "4/slim 4·N": {
        "step": 1.20, "step_overhead": 1.22, "imbalance": 1.005, "cuts": 7, "ms_per_plan": 1,
    },
    "16/slim 4·N": {"imbalance": 1.005},
}  # fmt: skip


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
    made = [
        Target(f"{key}: {name}", bound, rows[key][name])
        for key, bounds in TARGETS.items()
        if key in rows
        for name, bound in bounds.items()
    ]
    compared = ratios(rows)
    for figure in ("step", "step_interleaved"):
        if (key := f"16/{figure}, no delay") in compared:
            made.append(Target(f"slim 4·N over unsliced, {key}", 0.92, compared[key]["slim 4·N"]))
    return made


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Slices over the best whole-piece method, without and with delay, for both schedules.

    ``floor`` is what a step without any bubble would reach.
    """
    result = {}
    for count in dict.fromkeys(key.split("/")[0] for key in rows if key.endswith("/unsliced")):
        for figure in ("step", "step_interleaved"):
            for label, names in (("no delay", UNSLICED), ("any delay", UNSLICED + DELAYED)):
                best = min((rows[f"{count}/{name}"] for name in names), key=lambda row: row[figure])
                result[f"{count}/{figure}, {label}"] = {
                    "best": best["method"],
                    "floor": 1 / best[figure],
                    **{name: rows[f"{count}/{name}"][figure] / best[figure] for name in SLICED},
                }
    return result


def cells(rows: Mapping[str, dict[str, Any]], of: str = "") -> list[list[str]]:
    """The figures of the rows whose key begins so."""
    return [
        [shown(row[name]) for name in COLUMNS] for key, row in rows.items() if key.startswith(of)
    ]


def shown(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def show(result: dict[str, Any], console: Console) -> None:
    """The tables of a run."""
    for count in result["micro_batches"]:
        title = f"Generator A, N = {count}, PP {STAGES}, simulated"
        rows = cells(result["rows"], f"{count}/")
        console.print(report.table(title, list(COLUMNS.values()), rows))
    for name in ("slices over the best unsliced", "by_replicas", "merges"):
        console.print(name, result[name])
    for target in result["targets"]:
        console.print("{name}: {found:.4f}, at most {bound}: {met}".format(**target))


def markdown(result: dict[str, Any]) -> str:
    """The same as a page."""
    lines = ["# Slices on Generator A, simulated", "", "See `benchmarks/slimpack.py`."]

    def section(title: str, headings: Iterable[str], rows: list[list[str]], note: str = "") -> None:
        lines.extend(["", f"## {title}", "", *([note, ""] if note else [])])
        lines.extend(report.markdown_table(list(headings), rows))

    for count in result["micro_batches"]:
        section(
            f"N = {count}, PP {STAGES}, {len(result['seeds'])} seeds",
            COLUMNS.values(),
            cells(result["rows"], f"{count}/"),
        )
    section(
        "Targets",
        ("figure", "at most", "found", "met"),
        [
            [each["name"], f"{each['bound']:g}", f"{each['found']:.4f}", str(each["met"])]
            for each in result["targets"]
        ],
    )
    section(
        "Slices over the best method that keeps pieces whole",
        ("N, figure", "best", "floor", *SLICED),
        [
            [key, *(v if isinstance(v, str) else f"{v:.4f}" for v in row.values())]
            for key, row in result["slices over the best unsliced"].items()
        ],
    )
    if removed := result.get(report.REMOVED):
        rows = [
            [key, *(shown(row[name]) for name in COLUMNS if name != "method")]
            for key, row in removed["rows"].items()
        ]
        heads = ("N/method", *list(COLUMNS.values())[1:])
        section("Removed methods, as last measured", heads, rows, removed["note"])
    return "\n".join(lines) + "\n"
