"""Part 1: whether it is right on this device: the project's own tests, file by file.

A row is one run of pytest in a process of its own, so that a crash of the device costs no other
row: every file that has tests marked ``gpu``, and gradients of whole runs against one process. It
holds how many passed, failed and were skipped, what failed with its error, what was skipped with
the reason, and the figures that tests have recorded (``record_property``).

Tests run with this interpreter; pytest and hypothesis are all that they need beside the package.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.recording import Figures, Row, Run

ROOT = Path(__file__).parents[2]
MARK = "pytest.mark.gpu"
MOST_TEXT = 2000
"""Characters of an error that are kept, its end."""


def files_with_gpu_tests() -> list[str]:
    """Files of the tests, below the root, in which a test needs a CUDA device."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if MARK in path.read_text(encoding="utf-8")
    )


def rows(run: Run) -> list[Row]:
    """The files."""
    files = files_with_gpu_tests()[:1] if run.small else files_with_gpu_tests()
    return [(file, partial(tested, run, file, "-m", "gpu")) for file in files]


def tested(run: Run, *arguments: str) -> dict[str, Any]:
    """Run pytest, and say what became of the tests.

    Raises:
        RuntimeError: with the end of what it printed, if it ran no test to an end.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider"]
        ran = subprocess.run(
            [*command, f"--junitxml={report}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=run.left,
        )
        if not report.exists():
            raise RuntimeError((ran.stdout + ran.stderr)[-MOST_TEXT:])
        return outcome(report.read_text(encoding="utf-8"))


def outcome(report: str) -> dict[str, Any]:
    """The figures of a run from its report in JUnit's format."""
    counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    failures, reasons, recorded = [], Counter[str](), {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        problem = next((each for each in case if each.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if problem is not None:
            counts["failed"] += 1
            text = (problem.text or problem.get("message") or "")[-MOST_TEXT:]
            failures.append({"test": case.get("name"), "text": text})
        elif skip is not None:
            counts["skipped"] += 1
            reasons[skip.get("message") or ""] += 1
        else:
            counts["passed"] += 1
        found = {each.get("name"): each.get("value") for each in case.iter("property")}
        if found:
            recorded[case.get("name")] = found
    return {**counts, "failures": failures, "skipped_for": dict(reasons), "recorded": recorded}


def summary(done: Figures) -> dict[str, Any]:
    """Tests of all rows."""
    kinds = ("passed", "failed", "skipped")
    return {kind: sum(row[kind] for row in done.values()) for kind in kinds}
