"""Part 5: where the time of a training step goes, by torch's profiler.

One step of part 3's model and packing ``auto`` is profiled after one that warms up. The time of
every kernel on the device (on a CPU: of every operator, its children left out) counts as matrix
products, attention, or by its name as something else. Beside the shares stand the largest of what
is neither, and the time of the whole step.

The profiler slows the host down, so a step that is bound by launches looks worse than it is: its
time without the profiler is in part 3. The trace is kept as ``gpu_trace.json.gz``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.recording import Figures, Row, Run
from benchmarks.gpu.train import trained

ATTENTION = ("flash", "fmha", "attention")
PRODUCTS = ("gemm", "matmul", "aten::mm", "aten::addmm", "aten::bmm", "nvjet", "cublas", "cutlass")
"""Parts of the names of kernels and operators, attention's first: its kernels use cutlass too."""

SHOWN = 12


def kind_of(name: str) -> str:
    """What a kernel or an operator is counted as."""
    low = name.lower()
    for kind, words in (("attention", ATTENTION), ("products", PRODUCTS)):
        if any(word in low for word in words):
            return kind
    return "other"


def shares(times: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Shares of the kinds, and the largest of the others by name.

    Args:
        times: name and microseconds of every kernel that ran.
    """
    by_name: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, microseconds in times:
        by_name[name] += microseconds  # type: ignore[assignment]
        calls[name] += 1
    total = sum(by_name.values()) or 1.0
    kinds: Counter[str] = Counter()
    for name, microseconds in by_name.items():
        kinds[kind_of(name)] += microseconds
    others = [each for each in by_name.most_common() if kind_of(each[0]) == "other"]
    return {
        "milliseconds": total / 1e3,
        "shares": {kind: part / total for kind, part in kinds.items()},
        "largest_others": [
            {"name": name, "share": microseconds / total, "calls": calls[name]}
            for name, microseconds in others[:SHOWN]
        ],
    }


class Profiled(L.Callback):
    """Profiles the second step of a run.

    Args:
        device: whose time counts.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self.profiler = profile(activities=[ProfilerActivity.CPU, *cuda])

    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        """Begin with the step."""
        if trainer.global_step == 1:
            self.profiler.start()

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        """End with the step, which the recorder before has waited for."""
        if trainer.global_step == 2:
            self.profiler.stop()


def kernels(profiler: profile, device: torch.device) -> list[tuple[str, float]]:
    """Name and microseconds of all that ran on the device."""
    events = profiler.events() or []
    if device.type == "cuda":
        return [
            (event.name, event.time_range.elapsed_us())
            for event in events
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
    return [
        (event.name, event.self_cpu_time_total) for event in events if not event.is_user_annotation
    ]


def rows(run: Run) -> list[Row]:
    """The one step."""
    return [("step", partial(_row, run))]


def _row(run: Run) -> dict[str, Any]:
    profiled = Profiled(run.device)
    step = trained(run, "auto", 0, 2, callbacks=[profiled])[-1]
    profiled.profiler.export_chrome_trace(str(run.output / "gpu_trace.json.gz"))
    found = shares(kernels(profiled.profiler, run.device))
    return {**found, "wall_milliseconds": step.wall * 1e3}


def summary(done: Figures) -> dict[str, Any]:
    """The three largest that are neither matrix products nor attention."""
    return {name: row["largest_others"][:3] for name, row in done.items()}
