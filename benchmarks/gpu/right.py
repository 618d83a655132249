"""Part 1: whether it is right on this device: the project's own tests, file by file.

A row is one run of pytest in a process of its own, so that a crash of the device costs no other
row: every file that has tests marked ``gpu``, and then tests of gradients that run on any device
(``--device``), in float64 with the attention kernel ``exact``: dense attention is their definition
(:data:`GRADIENTS`). A row holds how many tests passed, failed and were skipped, what failed with
its error, what was skipped with the reason, and figures that tests have recorded.

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
ROW_SECONDS = 200
"""Limit of one row, so that ranks that wait for each other cost no other row."""

MOST_TEXT = 2000
"""Characters of an error that are kept, its end."""


GRADIENTS: dict[str, tuple[str, ...]] = {
    "gradients of a step": ("tests/models/test_language_module.py", "-k", "oracle"),
    "gradients of packed rows": ("tests/models/test_transformer.py", "-k", "gradients"),
    "three steps of one process": ("tests/strategy/test_reference.py",),
    "three steps, one rank": ("tests/strategy/test_gradients.py", "-k", "1x1x1x1"),
    "three steps, pipeline 2 on one device": (
        "tests/strategy/test_gradients.py",
        "-k",
        "1x2x1x1",
    ),
    "three steps, context 2 on one device": (
        "tests/strategy/test_gradients.py",
        "-k",
        "1x1x2x1",
    ),
    "three steps, data 2 on one device": (
        "tests/strategy/test_gradients.py",
        "-k",
        "2x1x1x1",
    ),
    "three steps, tensor 2 on one device": (
        "tests/strategy/test_gradients.py",
        "-k",
        "1x1x1x2",
    ),
}
"""What is run of the tests of gradients, from the smallest on."""


def files_with_gpu_tests() -> list[str]:
    """Files of the tests, below the root, in which a test needs a CUDA device."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if MARK in path.read_text(encoding="utf-8")
    )


def rows(run: Run) -> list[Row]:
    """The files, and the tests of gradients; of either the first in a small run."""
    device = ("--device", run.device.type, "--attention-backend", "exact")
    files = [(file, partial(tested, run, file, "-m", "gpu")) for file in files_with_gpu_tests()]
    gradients = [
        (name, partial(tested, run, *arguments, *device)) for name, arguments in GRADIENTS.items()
    ]
    if run.small:
        return [files[0], gradients[0]]
    # Two ranks of NCCL on one device are the likeliest to wait for each other until the limit.
    return sorted([*files, *gradients], key=lambda row: "nccl" in row[0])


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
            timeout=min(max(run.left - 10, 1), ROW_SECONDS),
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
