"""Steps on other pipelines: random runs, eight ranks, resumed runs, and runs that fail there."""

import os
import pickle
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_wlb.cost.profile import Profile
from lightning_wlb.heterogeneous import parameters
from lightning_wlb.plan import Scheme, Schemes, StepPlan
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.supervision import heartbeat
from lightning_wlb.training import executor
from tests.heterogeneous.fixed_choices import take_in_turn
from tests.heterogeneous.random_runs import (
    random_run,
    reference,
    train,
    worst_error,
)
from tests.ranks import run_ranks
from tests.strategy.harness import (
    Case,
    Recorder,
    data,
    module,
    relative_error,
    trainer,
)
from tests.strategy.test_failures import SAID, outcomes

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
CASE = Case("slim", "adaptive", tied=True, masked=True, layers=2)
TIED = {"model.head.weight": "model.embed.weight"}

# Ranks, and runs that are drawn for them.
DRAWN = ((2, 10), (3, 10), (4, 40), (6, 10), (8, 15))
TOGETHER = 5  # runs one after another in the same processes


def train_all(rank: int, ranks: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    return [train(rank, random_run(seed, ranks)) for seed in seeds]


@pytest.mark.parametrize(("ranks", "count"), DRAWN)
def test_random_strategies_train_as_one_process_does(ranks: int, count: int) -> None:
    for first in range(0, count, TOGETHER):
        seeds = range(first, first + TOGETHER)
        of_ranks = run_ranks(train_all, ranks, ranks, seeds, timeout=300)
        for number, seed in enumerate(seeds):
            run = random_run(seed, ranks)
            error = worst_error(run, [each[number] for each in of_ranks], reference(run))
            assert error <= 1e-10, (seed, ranks, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_gives_the_same_bits_again(dtype: torch.dtype) -> None:
    for seed in range(4):
        run = random_run(seed, 4)
        first, second = (run_ranks(train, 4, run, dtype, timeout=200) for _ in range(2))
        assert pickle.dumps(first) == pickle.dumps(second), seed


def fit(
    rank: int,
    mesh: tuple[int, ...],
    strategies: Sequence[Schemes],
    case: Case = CASE,
    ckpt_path: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A run on a mesh whose steps leave it in turn."""
    if strategies:
        take_in_turn([*strategies, ()])
    recorder, ranks = Recorder(), int(np.prod(mesh))
    callbacks = [recorder, *options.pop("callbacks", ())]
    strategy = WLBStrategy(*mesh, dynamic=strategies or "off")
    runner = trainer(strategy, ranks, callbacks=callbacks, max_steps=4, **options)
    profile = replace(Profile.load("cpu"), devices_per_node=ranks)
    documents = data(case, profile=profile if strategies else "none")
    runner.fit(module(case), documents, ckpt_path=ckpt_path)
    return recorder.record()


def alone(case: Case) -> dict[str, Any]:
    recorder = Recorder()
    trainer("auto", 1, callbacks=[recorder], max_steps=4).fit(module(case), data(case))
    return recorder.record()


def check(of_ranks: Sequence[dict[str, Any]], want: dict[str, Any], steps: slice) -> None:
    """Losses and gradients of some of the steps, and parameters after all."""
    for found in of_ranks:
        np.testing.assert_allclose(found["losses"], want["losses"][steps], rtol=1e-10)
        for got, right in zip(
            [*found["gradients"], found["parameters"]],
            [*want["gradients"][steps], want["parameters"]],
            strict=True,
        ):
            for name, value in got.items():
                wanted = right[name if name in right else TIED[name]]
                assert relative_error(value, wanted) <= 1e-10, name


ON_EIGHT: tuple[Schemes, ...] = (
    (Scheme(0, (2,), tensor=4), Scheme(4, (1, 1), tensor=2)),
    (Scheme(0, (2,), 2, 2), Scheme(4, (1, 1)), Scheme(6, (2,)), Scheme(7, (2,))),
    tuple(Scheme(rank, (2,)) for rank in range(8)),  # more than there are pieces
)


@pytest.mark.parametrize(
    ("tied", "packing"), [(False, "hydraulis"), (True, "hydraulis"), (True, CASE.packing)]
)
def test_eight_ranks(tied: bool, packing: str) -> None:
    """Pipelines that are alike are idle where there are too few pieces, or share these."""
    case = replace(CASE, tied=tied, packing=packing)
    of_ranks = run_ranks(fit, 8, (2, 2, 1, 2), ON_EIGHT, case, timeout=300, process_group=False)
    plans = [StepPlan.from_json(text) for text in of_ranks[0]["plans"]]
    assert [plan.schemes for plan in plans] == [*ON_EIGHT, ()]
    forwards = [replica.forward for replica in plans[2].replicas]
    if packing == "hydraulis":
        assert not all(forwards)
    else:
        assert any(len(each.replicas) > 1 for forward in forwards for each in forward)
    check(of_ranks, alone(case), slice(None))


ON_FOUR: tuple[Schemes, ...] = (
    (Scheme(0, (2,), tensor=2), Scheme(2, (1, 1))),
    (Scheme(0, (2,), context=2), Scheme(2, (2,)), Scheme(3, (2,))),
)
OTHERS = ((Scheme(0, (1, 1), tensor=2),),)
ON_TWO = ((Scheme(0, (1, 1)),),)


def test_resumed_in_the_middle(tmp_path: Path) -> None:
    """On the same mesh bit for bit; on others, with other strategies or none, up to rounding."""
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    saving = {"enable_checkpointing": True, "callbacks": [saves]}
    common: dict[str, Any] = {"timeout": 300, "process_group": False}
    whole = run_ranks(save, 4, (1, 2, 1, 2), ON_FOUR, saving, **common)
    want, middle = alone(CASE), tmp_path / "step=2.ckpt"
    check(whole, want, slice(None))
    again = run_ranks(fit, 4, (1, 2, 1, 2), ON_FOUR, CASE, middle, **common)
    for first, second in zip(whole, again, strict=True):
        assert first["plans"][2:] == second["plans"]
        assert first["losses"][2:] == second["losses"]
        for name, value in first["parameters"].items():
            np.testing.assert_array_equal(value, second["parameters"][name])
    for mesh, strategies in (
        ((2, 1, 2, 1), OTHERS),
        ((2, 1, 1, 1), ON_TWO),
        ((1, 2, 1, 1), ()),
    ):
        ranks = int(np.prod(mesh))
        resumed = run_ranks(fit, ranks, mesh, strategies, CASE, middle, **common)
        check(resumed, want, slice(2, None))


def save(rank: int, mesh, strategies, options: dict[str, Any]) -> dict[str, Any]:
    return fit(rank, mesh, strategies, **options)


PLACES = {
    "pull": (parameters._ExchangedBucket, "wait"),
    "action": (executor.Step, "run"),
    "push": (parameters._ExchangedBucket, "reduce"),
}
ALONE = ((Scheme(0, (2,)), Scheme(1, (2,))),)


def fail(rank: int, victim: int, place: str, dies: bool) -> None:
    """A rank fails in its second step elsewhere; the mesh is a pipeline of both ranks."""
    heartbeat.PATIENCE = 1.0
    owner, name = PLACES[place]
    works, steps = getattr(owner, name), 0

    def begin(self: Any, *given: Any) -> Any:
        nonlocal steps
        steps += 1
        return begins(self, *given)

    begins, executor.Executor._runtime = executor.Executor._runtime, begin

    def fails(self: Any, *given: Any) -> Any:
        if steps == 3 and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if steps == 3:
            raise ZeroDivisionError(SAID)
        return works(self, *given)

    if rank == victim:
        setattr(owner, name, fails)
    fit(rank, (1, 2, 1, 1), ALONE, max_epochs=-1)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("dies", [False, True], ids=["raises", "dies"])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_elsewhere_ends_the_run(place: str, dies: bool, victim: int) -> None:
    results, seconds = outcomes(fail, 2, victim, place, dies)
    assert seconds < 30
    for rank, result in enumerate(results):
        if rank == victim and dies:
            assert result is None
            continue
        assert result is not None
        fine, text = result
        assert not fine
        where = rf"step 2 on the pipeline of ranks \[{victim}, "
        why = "has died without a word" if dies else rf"failed, {where}.*{SAID}"
        assert re.search(rf"rank {victim} {why}", text.splitlines()[-1]), text
