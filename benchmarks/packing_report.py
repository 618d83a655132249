"""What ``benchmarks.packing`` keeps and prints: rows in a file, and tables."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report

COLUMNS = {
    "time_over_work": "T/S", "time_over_work_p99": "p99", "time_over_equal": "T/T equal",
    "time_over_equal_p99": "p99", "imbalance_mean": "imbalance", "imbalance_p99": "p99",
    "imbalance_aggregate": "aggr.", "imbalance_forward_mean": "fwd",
    "imbalance_backward_mean": "bwd", "tokens_variation": "tokens cv", "tokens_least": "least",
    "delay_mean": "delay", "delay_max": "max", "micro_batches": "M", "ms_per_step": "ms",
    "steps": "steps",
}  # fmt: skip


class Results:
    """Figures of a run, kept in a file so that it can be continued or split.

    Args:
        head: what the file begins with.
        path: of the JSON file, None to keep nothing; a table goes beside it, as ``.md``.
        console: told of each row.
    """

    def __init__(self, head: Mapping[str, Any], path: Path | None, console: Console) -> None:
        self.content: dict[str, Any] = {**head, "table_2": {}, "methods": {}}
        self._head, self._path, self._console = head, path, console
        self._read()

    def row(
        self, part: str, name: str, asked: dict[str, Any], make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """A row that the file has for what is asked, or a new one."""
        kept: dict[str, Any] = self.content[part].get(name, {})
        if asked.items() <= kept.items():
            return kept
        begin = time.process_time()
        row = {**asked, **make()}
        self._update(lambda content: content[part].update({name: row}))
        self._console.print(f"[dim]{part} {name} ({time.process_time() - begin:.0f} s)")
        return row

    def _read(self) -> None:
        if self._path is not None and self._path.exists():
            self.content |= {**json.loads(self._path.read_text()), **self._head}

    def _update(self, change: Callable[[dict[str, Any]], None]) -> None:
        if self._path is None:
            change(self.content)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may have written rows since.
        lock = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            change(self.content)
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self.content, indent=1) + "\n")
            os.replace(partial, self._path)
            self._path.with_suffix(".md").write_text(markdown(self.content))
        finally:
            os.close(lock)


def tables(content: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, headings and rows."""
    paper = []
    for name, row in content["table_2"].items():
        gate = "" if "gate" not in row else ("passed" if row["passed"] else "FAILED")
        gap = f"{100 * row['gap_mean']:.2f} %" if "gap_mean" in row else ""
        paper.append([
            name, f"{row['paper']:.2f}", f"{row['imbalance_forward_mean']:.3f}", gate,
            f"{row['paper_ms']}", f"{row['ms_per_step']:.1f}", gap, f"{row['steps']}",
        ])  # fmt: skip

    def figures(methods: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
        return [
            [name, *(f"{row[column]:.{0 if column == 'steps' else 3}f}" for column in COLUMNS)]
            for name, row in methods.items()
            if not name.endswith("/default")
        ]

    heads = ["workload/N/cap/method", *COLUMNS.values()]
    return [
        (
            "Table 2 of WLB-LLM: forward imbalance max·N/Σ, N = 4, C = 128K",
            ["method/window or queues", "paper", "here", "gate", "paper ms", "ms", "gap", "steps"],
            paper,
        ),
        (
            f"Simulated step time over work ({content['stages']} stages unless x1 is said),"
            " imbalance max·K/Σ",
            heads,
            figures(content["methods"]),
        ),
        (
            "Removed methods, as last measured",
            heads,
            figures(content.get(report.REMOVED, {}).get("methods", {})),
        ),
    ]


def show(content: Mapping[str, Any], console: Console) -> None:
    """Print the tables."""
    for title, heads, rows in tables(content)[:2]:
        console.print(report.table(title, heads, rows))


def markdown(content: Mapping[str, Any]) -> str:
    """The tables as a page."""
    lines = [
        "# Packing methods on the reference workloads",
        "",
        "Made by `python -m benchmarks.packing --output benchmarks/results/packing.json`; do not"
        " edit. All times of steps are *simulated*: 1F1B, or PackFlow for slices, the exact work of"
        " LLaMA2-7B's layers, no communication and no cost per action. `T/S` is the step's time"
        " over its work per rank (1 = no bubble), `T/T equal` over that of N equal micro-batches,"
        " `delay` in steps, `least` the fewest tokens of a step over N·C, `ms` processor time of"
        " planning per step in plain Python. The rows `fixed_ilp` are of a solver that is no longer"
        " in the package."
        " The JSON beside this page has the seeds of each row and its steps.",
    ]
    *current, removed = tables(content)
    for title, heads, rows in current:
        if rows:
            lines += ["", f"## {title}", "", *report.markdown_table(heads, rows)]
    title, heads, rows = removed
    if rows:
        note = content[report.REMOVED]["note"]
        lines += ["", f"## {title}", "", note, "", *report.markdown_table(heads, rows)]
    return "\n".join(lines) + "\n"
