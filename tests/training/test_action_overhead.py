"""What actions take beside their model is found where it is known how much that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.schedule.actions import Action
from lightning_wlb.training import action_overhead as overhead
from lightning_wlb.training.action_overhead import measure_overhead
from lightning_wlb.training.executor import Step
from lightning_wlb.training.step_parameters import BucketInStep

CONFIG = TransformerConfig(dim=16, heads=1, kv_heads=1, ffn_dim=32)
# Seven matrices and two norms of a layer.
PER_LAYER = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
MILLISECOND = 1e6


class Stopwatch:
    """Counts the seconds of functions that are said to take some, and nothing else."""

    def __init__(self) -> None:
        self.now = 0.0

    def slower(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.now += seconds
            return function(*args)

        return call

    def begin_step(self) -> None:
        self.timed: list[SimpleNamespace] = []

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        begin = self.now
        yield
        self.timed.append(SimpleNamespace(action=action, compute=self.now - begin))

    def timings(self) -> list[SimpleNamespace]:
        return self.timed


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_what_an_action_and_a_gradient_take_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch()
    monkeypatch.setattr(overhead, "make_stopwatch", lambda device: watch)
    monkeypatch.setattr(Step, "run", watch.slower(Step.run, 2e-3))
    monkeypatch.setattr(BucketInStep, "_add", watch.slower(BucketInStep._add, 0.5e-3))
    found = measure_overhead(CONFIG, torch.device("cpu"), torch.float32)
    # Nine gradients of a layer, half a millisecond each; three more of the ends.
    assert found.parameter_ns * PER_LAYER == pytest.approx(4.5 * MILLISECOND, rel=1e-3)
    assert found.ns[0] == pytest.approx(2 * MILLISECOND)
    assert found.row_ns == (0.0, 0.0)
    assert not dist.is_initialized(), "a process group is left"
