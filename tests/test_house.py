"""The habits that keep the package one that can be read: sizes, names, and how docstrings begin."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import lightning_wlb

PACKAGE = Path(lightning_wlb.__file__).parent
LINES, FILES, LONGEST = 40_296, 217, 400
"""Most lines and files of the package, most lines of a file: who adds takes something away."""


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text()


def test_the_package_keeps_its_budget() -> None:
    lines = {name: text.count("\n") for name, text in sources()}
    assert sum(lines.values()) <= LINES
    assert len(lines) <= FILES
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


def test_every_class_has_a_name_of_its_own() -> None:
    names = Counter(
        node.name
        for _, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and node.name != "Options"  # each packing's own
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_docstrings_begin_with_their_subject() -> None:
    riddle = re.compile(r'"""(Of|That of|In which|Likewise)\b')
    assert [name for name, text in sources() if riddle.search(text)] == []


def test_no_room_reads_the_strategy_by_name_with_a_default() -> None:
    by_name = re.compile(r"getattr\((self\.)?trainer\.strategy")
    assert [name for name, text in sources() if by_name.search(text)] == []
