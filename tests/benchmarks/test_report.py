"""The last line, what stays in a file of results; committed pages are those of the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import packing_report, report, slimpack_paper, slimpack_tables

RESULTS = Path(report.__file__).with_name("results")


def test_a_file_keeps_what_it_has_of_removed_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep/result"
    report.finish({"row": 1}, path)
    assert json.loads(path.with_suffix(".json").read_text()) == {"row": 1}
    assert not path.with_suffix(".md").exists()
    path.with_suffix(".json").write_text(json.dumps({"row": 1, "removed": [2]}))
    report.finish({"row": 3}, path, str)
    kept = {"row": 3, "removed": [2]}
    assert json.loads(path.with_suffix(".json").read_text()) == kept
    assert path.with_suffix(".md").read_text() == str(kept)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"row": 3}


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("packing", packing_report.markdown),
        ("slimpack", slimpack_tables.markdown),
        ("slimpack_paper", slimpack_paper.markdown),
    ],
)
def test_committed_pages_are_made_of_the_committed_figures(name: str, page) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert (RESULTS / f"{name}.md").read_text() == page(result)
