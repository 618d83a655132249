"""``compile=True`` on meshes: the gradients of one uncompiled process, and few compilations."""

import os
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch._dynamo.utils import counters

from benchmarks.activation_count import count_activations
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import (
    CASES,
    Case,
    Recorder,
    data,
    module,
    on_mesh,
    reference,
    relative_error,
    trainer,
)

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler is installed"
    ),
]
STEPS = 50
OPTIONS: dict[str, Any] = {"max_steps": STEPS, "max_epochs": None}


class Graphs(Recorder):
    """How many graphs had been compiled after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.graphs.append(counters["stats"]["unique_graphs"])


def run(rank: int, mesh: tuple[int, ...], case: Case, counting: bool) -> dict[str, Any]:
    recorder = Graphs()
    strategy = WLBStrategy(*mesh)
    runner = trainer(strategy, int(np.prod(mesh)), callbacks=[recorder], **OPTIONS)
    if counting:
        recorder.on_train_start = lambda *_: count_activations(strategy.executor)
    runner.fit(module(case, compile=True), data(case))
    return recorder.record() | {"graphs": recorder.graphs}


@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("mesh", [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)])
def test_gradients_and_few_compilations(mesh: tuple[int, ...], mode: str, counting: bool) -> None:
    case = on_mesh(replace(CASES[0], packing="slim", activation_checkpointing=mode), mesh)
    wanted = reference(case, **OPTIONS)
    for record in run_ranks(run, 2, mesh, case, counting, process_group=False, timeout=300):
        assert len(record["losses"]) == STEPS
        assert record["losses"] == pytest.approx(wanted["losses"], rel=1e-9)
        for step, gradients in enumerate(record["gradients"]):
            for name, value in gradients.items():
                assert relative_error(value, wanted["gradients"][step][name]) <= 1e-8, (step, name)
        # Norm, queries, keys, SwiGLU, and the two of the loss where torch's own does not serve;
        # nothing where every operation is counted.
        assert (0 if counting else 4) <= record["graphs"][-1] <= (0 if counting else 6)
