"""Committed pages are made of the committed figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import packers_page, packing_report, paper_speedups, report, slimpack_paper

RESULTS = Path(report.__file__).with_name("results")


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("packing", packing_report.markdown),
        ("slimpack_paper", slimpack_paper.markdown),
        ("paper_speedups", paper_speedups.page),
        ("packers", packers_page.page),
    ],
)
def test_committed_pages_are_made_of_the_committed_figures(name: str, page) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert (RESULTS / f"{name}.md").read_text() == page(result)
