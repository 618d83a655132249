"""The tables in docs/reliability.md, written by the tests that measure what is in them.

A table stands between two marks. What a test writes replaces its own cell; those of other tests,
which may not have run this time, stay.
"""

import re
from pathlib import Path

from tests.soak.faults import FAULTS, Fault

PAGE = Path(__file__).parents[2] / "docs/reliability.md"
COLUMNS = (
    "PP 2 × DP 2",
    "PP 2 × DP 2, `save_on_exception`",
    "CP 2 × DP 2",
    "CP 2 × DP 2, `save_on_exception`",
)
ENDS = {
    "error": "ends with an error",
    "stops": "ends on all ranks together",
    "goes on": "goes on",
    "dies": "ends",
}


def write_outcome(fault: Fault, column: str, outcome: str) -> None:
    """What became of a run with a fault."""
    page = PAGE.read_text()
    cells = {name: dict(zip(COLUMNS, row[1:], strict=True)) for name, *row in _rows(page, "faults")}
    cells.setdefault(fault.name, {})[column] = outcome
    lines = [f"| Fault | Promised | {' | '.join(COLUMNS)} |", f"|{'---|' * (len(COLUMNS) + 2)}"]
    for each in FAULTS.values():
        row = [cells.get(each.name, {}).get(name, "") for name in COLUMNS]
        lines.append(f"| {each.name} | {ENDS[each.ends]} | {' | '.join(row)} |")
    PAGE.write_text(_replaced(page, "faults", lines))


def write_figure(name: str, result: str) -> None:
    """What a test has found."""
    page = PAGE.read_text()
    figures = {**dict(_rows(page, "figures")), name: result}
    lines = ["| What | Result |", "|---|---|"]
    lines += [f"| {each} | {figures[each]} |" for each in sorted(figures)]
    PAGE.write_text(_replaced(page, "figures", lines))


def _rows(page: str, table: str) -> list[list[str]]:
    found = re.search(_marks(table), page, re.DOTALL)
    assert found is not None
    lines = [line for line in found[2].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def _replaced(page: str, table: str, lines: list[str]) -> str:
    text = "\n".join(lines)
    return re.sub(_marks(table), lambda found: f"{found[1]}{text}\n{found[3]}", page, flags=re.S)


def _marks(table: str) -> str:
    return rf"(<!-- {table}: [^\n]*-->\n)(.*?)(<!-- end of {table} -->)"
