"""Rows of a part: each is made by a function, and the file is written anew after each.

A row that raises is kept with its error, and the next one is made. The part has a time limit: no
row begins after it, and one that still runs then is given up with the process. So whatever happens
to the machine, the file holds every row that was finished, and names those that were left out.

Cost: writing a file of some kilobytes per row. Not for results of megabytes.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.page import page
from lightning_wlb.attention.backends import VarlenAttention, available_backends

Row = tuple[str, Callable[[], dict[str, Any]]]
"""Its name, and what makes its figures, in plain types."""

Figures = Mapping[str, dict[str, Any]]
"""Rows that were made without an error, by name."""

PACKAGES = ("lightning", "triton", "flash-attn", "flash-attn-3", "flash-attn-4")
"""Whose versions are noted, beside torch's, where they are installed."""


@dataclass(frozen=True)
class Run:
    """How a part is to be run.

    Args:
        device: that is measured.
        small: tiny sizes, which show that the program runs and nothing about speed.
        output: folder for the results.
        seconds: limit of the part.
        begin: when it began, by ``time.monotonic``.
    """

    device: torch.device
    small: bool
    output: Path
    seconds: float
    begin: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until the limit; not below 0."""
        return max(self.begin + self.seconds - time.monotonic(), 0.0)


def record(
    name: str,
    rows: Sequence[Row],
    run: Run,
    summary: Callable[[Figures], dict[str, Any]] = lambda done: {},
    show: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Make the rows of a part in order, within its limit.

    Args:
        name: of the part, and of the files in ``run.output``, ``gpu_<name>.json`` and, as tables,
            ``gpu_<name>.md``.
        rows: to make; their names differ.
        run: with the limit. Where a row outlasts it, the file is written and the *process ends*,
            with its result as the last line and exit status 1: a row may wait for the device for
            ever, and nothing else would end that.
        summary: figures of all rows that are there, made anew after each.
        show: is told of each row that is made.

    Returns:
        What the file holds.
    """
    part = _Part(name, [each for each, _ in rows], run, summary)
    limit = threading.Timer(run.left, part.give_up)
    limit.daemon = True
    limit.start()
    for row, make in rows:
        _free(run.device)
        if not part.begin(row):
            break
        show(f"{row} ... ({run.left:.0f} s left)")
        made = part.take(row, make)
        show(f"  {json.dumps(made)}")
    limit.cancel()
    return part.result


class _Part:
    """The result of a part as it grows."""

    def __init__(
        self, name: str, rows: list[str], run: Run, summary: Callable[[Figures], dict[str, Any]]
    ) -> None:
        self._path = run.output / f"gpu_{name}.json"
        self._run, self._summary = run, summary
        self._lock = threading.Lock()
        self._current: str | None = None
        self.result: dict[str, Any] = {
            "benchmark": "gpu",
            "part": name,
            "small": run.small,
            "limit_seconds": run.seconds,
            **machine(run.device),
            "rows": {},
            "left_out": rows,
            "summary": {},
        }
        self._write()

    def begin(self, row: str) -> bool:
        """Whether there is time for a row; from here on the limit ends it."""
        with self._lock:  # either this sees that the limit is over, or what gives up sees the row
            self._current = row if self._run.left else None
        return self._current is not None

    def take(self, row: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Make one row and write the file."""
        begin = time.monotonic()
        try:
            made = make()
            if self._run.device.type == "cuda":
                torch.cuda.synchronize(self._run.device)  # an error of a kernel shows here
        except Exception as error:
            made = {"error": f"{type(error).__name__}: {error}", "at": _places(error)}
        made["seconds"] = round(time.monotonic() - begin, 1)
        with self._lock:
            self._current = None
            self._keep(row, made)
        return made

    def give_up(self) -> None:
        """The limit is reached: end the process if a row still runs."""
        with self._lock:
            if self._current is None:
                return
            limit = f"{self._run.seconds:g} s"
            self._keep(self._current, {"error": f"cut at the part's limit of {limit}"})
            print(json.dumps(self.result), flush=True)
            os._exit(1)

    def _keep(self, row: str, made: dict[str, Any]) -> None:
        rows = self.result["rows"]
        rows[row] = made
        self.result["left_out"].remove(row)
        done = {name: each for name, each in rows.items() if "error" not in each}
        self.result["summary"] = self._summary(done)
        self._write()

    def _write(self) -> None:
        # Never half a file, also where the process is killed while it writes.
        for suffix, content in (
            (".json", json.dumps(self.result, indent=1) + "\n"),
            (".md", page(self.result)),
        ):
            fresh = self._path.with_suffix(f"{suffix}.new")
            fresh.write_text(content, encoding="utf-8")
            fresh.replace(self._path.with_suffix(suffix))


def machine(device: torch.device) -> dict[str, Any]:
    """What results depend on: the device, its driver, torch, kernels."""
    cuda = device.type == "cuda"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if cuda:
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["driver"] = _driver()
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "kernel": VarlenAttention().kernel_name(device.type),
        "backends": available_backends(),
        "versions": versions,
    }


def _driver() -> str:
    """Version of the NVIDIA driver, which torch does not tell."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown: there is no nvidia-smi"
    asked = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    return (answer.stdout or answer.stderr).strip().split("\n")[0]


def _places(error: Exception) -> list[str]:
    """The last calls that led to an error, the innermost last."""
    calls = traceback.extract_tb(error.__traceback__)[-6:]
    return [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in calls]


def _free(device: torch.device) -> None:
    """Give back what the last row, or its error, has held of a GPU's memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
