"""Promise 1 for sliced plans: how pieces are cut over micro-batches changes no gradient."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_wlb.attention.sharding import layout
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.sampler import StepDataset
from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice, StepPlan, symmetric_backward
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import CASES, WINDOW, Case, Recorder, documents, module, trainer
from tests.strategy.test_gradients import check_equal

MICRO_BATCHES = 5


def sliced(plan: StepPlan, at: Any, sharding: str) -> StepPlan:
    """The same pieces, cut at random and spread over more micro-batches, in legal order."""
    generator = random.Random(plan.step)
    replicas = []
    for number, replica in enumerate(plan.replicas):
        groups: list[list[Slice]] = [[] for _ in range(MICRO_BATCHES)]
        for whole in replica.slices:
            # From one slice to one in every micro-batch, down to a single token.
            count = generator.randint(1, min(MICRO_BATCHES, whole.tokens))
            cuts = sorted(generator.sample(range(whole.start + 1, whole.stop), count - 1))
            edges = [whole.start, *cuts, whole.stop]
            first = generator.randint(0, MICRO_BATCHES - count)
            for index in range(count):
                part = Slice(whole.document, whole.origin, edges[index], edges[index + 1])
                groups[first + index].append(part)
        slices = [part for group in groups for part in group]
        forward, begin = [], 0
        for group in filter(None, groups):
            arrangement = layout(
                sharding,
                [part.tokens for part in group],
                at.context_parallel_size,
                at.tensor_parallel_size,
            )
            members = tuple(range(begin, begin + len(group)))
            forward.append(MicroBatch(members, sharding, arrangement.rows, (number,)))
            begin += len(group)
        replicas.append(
            ReplicaPlan(tuple(slices), tuple(forward), symmetric_backward(slices, forward))
        )
    return replace(plan, replicas=tuple(replicas), cap=plan.tokens).validate()


class SlicingPlanner:
    """A planner whose plans are cut into slices."""

    def __init__(self, planner: Any, at: Any, sharding: str) -> None:
        self._planner, self._at, self._sharding = planner, at, sharding

    def next_step(self) -> StepPlan | None:
        plan = self._planner.next_step()
        return None if plan is None else sliced(plan, self._at, self._sharding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


class SlicingDataset(StepDataset):
    def planner(self) -> Any:
        return SlicingPlanner(super().planner(), self.at, self.sharding)


class SlicingData(WLBDataModule):
    def _dataset(self, store, settings):
        dataset = super()._dataset(store, settings)
        dataset.__class__ = SlicingDataset
        return dataset


def sliced_data(case: Case) -> WLBDataModule:
    return SlicingData(
        documents(case.masked),
        context_window=WINDOW,
        micro_batches=3,
        packing=case.packing,
        sharding=case.sharding,
    )


def run_sliced(rank: int, runs: tuple[tuple[Any, ...], ...]) -> list[dict]:
    results = []
    for mesh, schedule, case in runs:
        recorder = Recorder()
        strategy = WLBStrategy(*mesh, schedule=schedule)
        runner = trainer(strategy, int(np.prod(mesh)), callbacks=[recorder])
        runner.fit(module(case), sliced_data(case))
        results.append(recorder.record())
    return results


def test_one_process_without_an_executor():
    recorder = Recorder()
    trainer("auto", 1, callbacks=[recorder]).fit(module(CASES[0]), sliced_data(CASES[0]))
    check_equal([recorder.record()], CASES[0])


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        (1, tuple(((1, 1, 1, 1), "1f1b", case) for case in CASES[:4])),
        (
            2,
            (
                ((2, 1, 1, 1), "1f1b", CASES[0]),
                ((1, 2, 1, 1), "1f1b", CASES[1]),
                ((1, 2, 1, 1), "interleaved", CASES[0]),
                ((1, 1, 2, 1), "1f1b", CASES[2]),
                ((1, 1, 2, 1), "1f1b", CASES[3]),
                ((1, 1, 1, 2), "1f1b", CASES[0]),
            ),
        ),
        (
            4,
            (
                ((1, 4, 1, 1), "1f1b", CASES[0]),
                ((1, 1, 4, 1), "1f1b", CASES[5]),
                ((2, 1, 2, 1), "1f1b", CASES[4]),
                ((1, 2, 1, 2), "1f1b", CASES[2]),
                ((1, 2, 2, 1), "interleaved", CASES[3]),
            ),
        ),
    ],
)
def test_sliced_plans_give_the_same_gradients(ranks, runs):
    results = run_ranks(run_sliced, ranks, runs, process_group=False)
    for index, (_, _, case) in enumerate(runs):
        check_equal([rank[index] for rank in results], case)
