"""Committed pages are made of the committed figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import (
    hydraulis_paper,
    one_process,
    overlap,
    packers,
    packing_report,
    paper_speedups,
    report,
    slimpack_paper,
)

RESULTS = Path(report.__file__).with_name("results")


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("packing", packing_report.markdown),
        ("slimpack_paper", slimpack_paper.markdown),
        ("paper_speedups", paper_speedups.page),
        ("packers", packers.page),
        ("hydraulis_paper", hydraulis_paper.markdown),
        ("overlap", overlap.markdown),
        ("one_process", lambda result: one_process.page(result["turns"])),
    ],
)
def test_committed_pages_are_made_of_the_committed_figures(name: str, page) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert (RESULTS / f"{name}.md").read_text() == page(result)


def test_a_page_is_written_beside_the_result_it_is_made_of(tmp_path: Path, capsys) -> None:
    (tmp_path / "copy.json").write_bytes((RESULTS / "hydraulis_paper.json").read_bytes())
    hydraulis_paper.main(["--kept", str(tmp_path / "copy.json")])
    page = (RESULTS / "hydraulis_paper.md").read_text()
    assert (tmp_path / "copy.md").read_text() == page
    assert capsys.readouterr().out == page + "\n"
    assert (tmp_path / "copy.png").stat().st_size > 0
