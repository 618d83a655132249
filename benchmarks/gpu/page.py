"""The rows of a part as a page of tables, whatever they hold.

The summary comes first. Rows with the same figures, one after another, share a table. A figure that
has figures of its own by name makes a column of each, and a list of records a table below.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from benchmarks.report import markdown_table

MOST_TEXT = 200
"""Characters of a text that a cell shows."""


def page(result: Mapping[str, Any]) -> str:
    """The page of what :func:`.recording.record` returns."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"# python -m benchmarks.gpu --part {result['part']}",
        "",
        f"{result['device']}, attention by {result['kernel']}; {versions}."
        + (" Tiny sizes, which say nothing about speed." if result["small"] else ""),
    ]
    summary = result["summary"]
    alone = {name: each for name, each in summary.items() if not isinstance(each, Mapping)}
    lines += tables({name: each for name, each in summary.items() if name not in alone})
    lines += tables({"summary": alone})
    lines += tables(result["rows"])
    for name, row in result["rows"].items():
        for figure, value in row.items():
            if is_records(value):
                every = [cells(record) for record in value]
                table = [list(record.values()) for record in every]
                lines += ["", f"{name}: {figure}", "", *markdown_table(list(every[0]), table)]
    if result["left_out"]:
        lines += ["", f"Left out at the limit: {', '.join(result['left_out'])}."]
    return "\n".join([*lines, ""])


def tables(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Tables of rows by name, one for neighbours with the same figures."""
    lines = []
    flat = [(name, cells(row)) for name, row in rows.items()]
    for columns, group in groupby(flat, key=lambda each: tuple(each[1])):
        if columns:
            table = [[name, *figures.values()] for name, figures in group]
            lines += ["", *markdown_table(["", *columns], table)]
    return lines


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The figures of a row as texts by column."""
    found: dict[str, str] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{name}: {inner}": text(each) for inner, each in value.items()}
        elif not is_records(value):
            found[name] = text(value)
    return found


def is_records(value: Any) -> bool:
    """Whether it is a list of figures by name, with something in it."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def text(value: Any) -> str:
    """One cell: numbers with four digits, lists with commas, no line break."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(text, value))
    return " ".join(str(value).replace("|", "/").split())[:MOST_TEXT]
