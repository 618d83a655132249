"""What every benchmark prints: a parser, tables, and one JSON object as the last line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

REMOVED = "removed"
"""Key in a file of results: what was measured last of methods that are no longer in the package."""


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of a script.

    Args:
        module: name of the script, without the package.
        doc: its docstring; the first line describes it.
    """
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=(doc or "").split("\n")[0]
    )


def table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None
) -> Table:
    """A table to print: the first column to the left, figures to the right."""
    made = Table(title=title, caption=caption)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return made


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The same as the lines of a page."""
    rule = ["---"] + ["---:"] * (len(headings) - 1)
    return ["| " + " | ".join(row) + " |" for row in (headings, rule, *rows)]


def finish(result: Mapping[str, Any], path: Path | None = None) -> None:
    """Print the result as one line of JSON, and write it to a file if there is a path."""
    line = json.dumps(result)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line + "\n")
    print(line)


def with_removed(result: dict[str, Any], path: Path) -> dict[str, Any]:
    """The result, with what the file that it will replace holds of removed methods."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    return {**result, REMOVED: kept[REMOVED]} if REMOVED in kept else result
