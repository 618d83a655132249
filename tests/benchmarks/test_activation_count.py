"""The count of activations: against sums by hand, and over whole steps."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as L
import pytest
import torch

from benchmarks.activation_count import ActivationCount, count_activations
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.device import BACKEND
from tests.ranks import run_ranks
from tests.strategy.changed_plans import changed_data
from tests.strategy.harness import CASES, Case, data, module, trainer

ROWS, WIDTH = 10, 8


def test_what_a_forward_leaves_is_counted_once_and_nothing_else():
    weight = torch.ones(WIDTH, WIDTH, requires_grad=True)
    given = torch.ones(ROWS, WIDTH)
    count = ActivationCount()
    with count:
        linear = given @ weight  # needed by nothing: relu keeps its own result
        active = linear.relu()
        del linear
        view = active.view(WIDTH, ROWS)  # no storage of its own
        total = (view * active.view(WIDTH, ROWS)).sum()
    count.sample()
    assert count.held_bytes == [ROWS * WIDTH * 4 + 4]
    total.backward()
    del total, view, active
    count.sample()
    assert count.held_bytes[-1] == 0
    assert max(count.held_bytes) == ROWS * WIDTH * 4 + 4


def test_what_is_named_counts_like_what_a_forward_made():
    count = ActivationCount()
    message = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    count.add([message, message[2:]])
    count.sample()
    count.add([message])
    count.sample()
    assert count.held_bytes == [ROWS * WIDTH * 8] * 2
    count.begin_step()
    assert count.held_bytes == []


def test_what_is_held_under_hooks_and_by_functions_themselves_is_counted():
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.own = x.exp()  # not by save_for_backward
            return x + 0

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.own

    count = ActivationCount()
    x = torch.ones(ROWS, requires_grad=True)
    with count:
        kept = Keeps.apply(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            hidden = kept.exp()
        del kept
        out = hidden.sum()
        del hidden
    count.sample()
    assert count.held_bytes == [2 * ROWS * 4 + 4]  # ctx.own, exp's result, and the sum
    out.backward()


class Held(L.Callback):
    """Keeps what was held after each action of every step."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.forwards: list[int] = []

    def on_fit_start(self, trainer, pl_module) -> None:
        self.count = count_activations(trainer.strategy.executor)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.steps.append(self.count.held_bytes)
        self.forwards.append(len(batch.micro_batches))


def counted(case: Case) -> tuple[list[list[int]], list[int]]:
    held = Held()
    runner = trainer(WLBStrategy(1, 2), 2, callbacks=[held], max_steps=1)
    runner.fit(module(case), data(case))
    return held.steps, held.forwards


def test_a_step_ends_with_nothing_held_and_open_micro_batches_add_up(ranks):
    for rank, (of_rank, _) in enumerate(ranks):
        for held, forwards in zip(*of_rank, strict=True):
            assert held[-1] == 0
            assert len(held) == 2 * forwards + 1
            # The first stage opens a second micro-batch, the last one ends the first before.
            assert 0 < held[0] < held[1] if rank == 0 else 0 < held[1] < held[0]


class Compared(L.Callback):
    """Holds every step's count against the simulator's account."""

    def __init__(self) -> None:
        self.sliced = 0
        self.modes: set[str] = set()

    def on_fit_start(self, trainer, pl_module) -> None:
        self.count = count_activations(trainer.strategy.executor)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        executor = trainer.strategy.executor
        profile = replace(Profile.load("h100"), dtype="float32", device_type="cpu")
        latency = LatencyModel(profile, pl_module.model_shape, Mesh(pipeline=2))
        predictor = Predictor(latency, executor.pipeline.stages)
        predicted = predictor.simulate(batch.plan.replicas)
        (simulation,) = predicted.simulations
        rank = executor.pipeline.rank.pipeline
        held = simulation.held_bytes[rank]
        constant = simulation.constant_bytes[rank]
        counted = self.count.held_bytes
        program = [span.action for span in simulation.spans[rank]]
        for action, expected, found in zip(program, held, counted[:-1], strict=True):
            if action.kind == "F":  # a backward is counted when it has freed its own
                # torch's loss keeps no log-sum for each row, which the model counts.
                assert expected - constant == pytest.approx(found, rel=0.02 if rank else 0)
        (replica,) = batch.plan.replicas
        self.sliced += any(part.context for part in replica.slices)
        self.modes.update(each.recompute for each in replica.forward)


def compared(mixed: bool) -> tuple[int, set[str]]:
    case, held = Case(packing="slim"), Compared()
    options = {"packing": {"method": "slim", "micro_packs": 2}}
    made = changed_data(case, "recomputing", **options) if mixed else data(case, **options)
    runner = trainer(WLBStrategy(1, 2), 2, callbacks=[held], precision="32-true", max_steps=1)
    runner.fit(module(case), made)
    return held.sliced, held.modes


def on_ranks(rank: int) -> tuple[tuple[list[list[int]], list[int]], list[tuple[int, set[str]]]]:
    # The exact kernel keeps neither its output nor log-sum-exp.
    return counted(CASES[0]), [] if BACKEND == "exact" else [
        compared(each) for each in (False, True)
    ]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_ranks, 2, process_group=False)


@pytest.mark.skipif(BACKEND == "exact", reason="keeps neither its output nor log-sum-exp")
def test_the_count_of_sliced_steps_is_what_the_simulator_predicts(ranks):
    """Byte for byte on the first stage."""
    for _, (plain, mixed) in ranks:
        assert min(plain[0], mixed[0]) > 0
        assert (plain[1], mixed[1]) == ({"none"}, set(MODES))
