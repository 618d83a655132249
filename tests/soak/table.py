"""The table of faults in docs/reliability.md, written by the test that runs them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.soak.faults import FAULTS, Fault

PAGE = Path(__file__).parents[2] / "docs/reliability.md"
BEGIN, END = "<!-- faults: written by tests/soak/test_faults.py -->", "<!-- end of faults -->"
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


def write(fault: Fault, column: str, cell: str) -> None:
    """Put one outcome into the table, and leave those of other rows and columns as they are."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    cells = {
        name: dict(zip(COLUMNS, row, strict=True))
        for name, _, *row in (
            [part.strip() for part in line.strip("|").split("|")]
            for line in old.splitlines()
            if re.match(r"\| [^-]", line)
        )
    }
    cells.setdefault(fault.name, {})[column] = cell
    lines = [
        f"| Fault | Promised | {' | '.join(COLUMNS)} |",
        f"|{'---|' * (len(COLUMNS) + 2)}",
    ]
    for each in FAULTS.values():
        row = [cells.get(each.name, {}).get(name, "") for name in COLUMNS]
        lines.append(f"| {each.name} | {ENDS[each.ends]} | {' | '.join(row)} |")
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after)
