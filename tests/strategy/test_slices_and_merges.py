"""Promise 1 for plans that slice pieces over micro-batches, or merge replicas for one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lightning_wlb.attention.sharding import ADAPTIVE, layout
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


def asymmetric(plan: StepPlan, at: Any, sharding: str) -> StepPlan:
    """A sliced plan whose backward groups other slices than its forward does."""
    plan = sliced(plan, at, sharding)
    generator = random.Random(plan.step + 1)
    replicas = []
    for number, replica in enumerate(plan.replicas):
        # Backwards in the legal order of single slices, cut anywhere.
        singles = [
            MicroBatch((index,), sharding, 0, (number,)) for index in range(len(replica.slices))
        ]
        order = [group.slices[0] for group in symmetric_backward(replica.slices, singles)]
        cuts = sorted(generator.sample(range(len(order) + 1), min(3, len(order))))
        edges = [0, *cuts, len(order)]
        backward = [
            MicroBatch(tuple(order[a:b]), sharding, 0, (number,))
            for a, b in pairwise(edges)
            if a < b
        ]
        replicas.append(ReplicaPlan(replica.slices, replica.forward, tuple(backward)))
    return replace(plan, replicas=tuple(replicas)).validate()


def merged(plan: StepPlan, at: Any, sharding: str) -> StepPlan:
    """The same pieces, the longest of each aligned pair or four of replicas shared by them."""
    count = len(plan.replicas) if plan.step % 2 else 2
    replicas: list[ReplicaPlan] = []
    for first in range(0, len(plan.replicas), count):
        members = plan.replicas[first : first + count]
        pieces = [part for replica in members for part in replica.slices]
        names = tuple(range(first, first + count))
        shared = [max(pieces, key=lambda part: part.tokens)] if pieces else []
        for number, replica in zip(names, members, strict=True):
            groups = [(shared, names)] if shared else []
            rest = [
                [part for part in replica.slices_of(g) if part not in shared]
                for g in replica.forward
            ]
            groups += [(group, (number,)) for group in rest if group]
            slices, forward = [], []
            for group, owners in groups:
                arrangement = layout(
                    sharding,
                    [part.tokens for part in group],
                    at.context_parallel_size * len(owners),
                    at.tensor_parallel_size,
                )
                indices = tuple(range(len(slices), len(slices) + len(group)))
                forward.append(MicroBatch(indices, sharding, arrangement.rows, owners))
                slices += group
            replicas.append(ReplicaPlan(tuple(slices), tuple(forward), tuple(forward)))
    return replace(plan, replicas=tuple(replicas)).validate()


def sliced_and_merged(plan: StepPlan, at: Any, sharding: str) -> StepPlan:
    """As :func:`merged`, with every piece cut in up to three consecutive micro-batches."""
    generator = random.Random(plan.step)
    plan = merged(plan, at, sharding)
    cuts: dict[Slice, list[Slice]] = {}
    replicas = []
    for number, replica in enumerate(plan.replicas):
        slices: list[Slice] = []
        forward = []
        # Own micro-batches are only cut where the replica is odd, so that warm-ups differ.
        for group in replica.forward:
            (*rest, last) = replica.slices_of(group)
            parts = [*rest, last]
            groups = [parts]
            if (len(group.replicas) > 1 or number % 2) and last.tokens >= 3:
                if last not in cuts:
                    at_token = sorted(generator.sample(range(last.start + 1, last.stop), 2))
                    edges = [last.start, *at_token, last.stop]
                    cuts[last] = [last._replace(start=a, stop=b) for a, b in pairwise(edges)]
                first, *others = cuts[last]
                groups = [[*rest, first], *([other] for other in others)]
            for parts in groups:
                arrangement = layout(
                    sharding,
                    [part.tokens for part in parts],
                    at.context_parallel_size * len(group.replicas),
                    at.tensor_parallel_size,
                )
                indices = tuple(range(len(slices), len(slices) + len(parts)))
                forward.append(MicroBatch(indices, sharding, arrangement.rows, group.replicas))
                slices += parts
        replicas.append(
            ReplicaPlan(tuple(slices), tuple(forward), symmetric_backward(slices, forward))
        )
    return replace(plan, replicas=tuple(replicas)).validate()


class ChangingPlanner:
    """A planner whose plans are rewritten."""

    def __init__(self, planner: Any, change: Callable[[StepPlan], StepPlan]) -> None:
        self._planner, self._change = planner, change

    def next_step(self) -> StepPlan | None:
        plan = self._planner.next_step()
        return None if plan is None else self._change(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


class SlicingDataset(StepDataset):
    def planner(self) -> Any:
        return ChangingPlanner(super().planner(), lambda plan: sliced(plan, self.at, self.sharding))


class AsymmetricDataset(StepDataset):
    def planner(self) -> Any:
        return ChangingPlanner(
            super().planner(), lambda plan: asymmetric(plan, self.at, self.sharding)
        )


class MergingDataset(StepDataset):
    def planner(self) -> Any:
        return ChangingPlanner(super().planner(), lambda plan: merged(plan, self.at, self.sharding))


class SlicingAndMergingDataset(StepDataset):
    def planner(self) -> Any:
        return ChangingPlanner(
            super().planner(), lambda plan: sliced_and_merged(plan, self.at, self.sharding)
        )


def sharding_of(case: Case) -> str:
    """Plans made here name a sharding; the adaptive choice is the planner's."""
    return "hybrid" if case.sharding == ADAPTIVE else case.sharding


class ChangingData(WLBDataModule):
    kind: type[StepDataset] = SlicingDataset

    def _dataset(self, store, settings):
        dataset = super()._dataset(store, settings)
        dataset.__class__ = self.kind
        return dataset


def changed_data(case: Case, kind: type[StepDataset]) -> WLBDataModule:
    data = ChangingData(
        documents(case.masked),
        context_window=WINDOW,
        micro_batches=3,
        packing=case.packing,
        sharding=sharding_of(case),
    )
    data.kind = kind
    return data


def run_changed(rank: int, runs: tuple[tuple[Any, ...], ...], kind: type) -> list[dict]:
    results = []
    for mesh, schedule, case in runs:
        recorder = Recorder()
        strategy = WLBStrategy(*mesh, schedule=schedule)
        runner = trainer(strategy, int(np.prod(mesh)), callbacks=[recorder])
        runner.fit(module(case), changed_data(case, kind))
        results.append(recorder.record())
    return results


def test_one_process_without_an_executor():
    recorder = Recorder()
    trainer("auto", 1, callbacks=[recorder]).fit(
        module(CASES[0]), changed_data(CASES[0], SlicingDataset)
    )
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
    results = run_ranks(run_changed, ranks, runs, SlicingDataset, process_group=False)
    for index, (_, _, case) in enumerate(runs):
        check_equal([rank[index] for rank in results], case)


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        (1, tuple(((1, 1, 1, 1), "1f1b", case) for case in CASES[:3])),
        (
            2,
            (
                ((2, 1, 1, 1), "1f1b", CASES[3]),
                ((1, 2, 1, 1), "1f1b", CASES[0]),
                ((1, 2, 1, 1), "1f1b", CASES[1]),
                ((1, 2, 1, 1), "interleaved", CASES[2]),
                ((1, 1, 2, 1), "1f1b", CASES[4]),
                ((1, 1, 1, 2), "1f1b", CASES[5]),
            ),
        ),
        (4, (((1, 4, 1, 1), "1f1b", CASES[2]), ((1, 2, 2, 1), "1f1b", CASES[0]))),
    ],
)
def test_asymmetric_plans_give_the_same_gradients(ranks, runs):
    results = run_ranks(run_changed, ranks, runs, AsymmetricDataset, process_group=False)
    for index, (_, _, case) in enumerate(runs):
        check_equal([rank[index] for rank in results], case)


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        (
            2,
            (
                ((2, 1, 1, 1), "1f1b", CASES[0]),
                ((2, 1, 1, 1), "1f1b", CASES[1]),
                ((2, 1, 1, 1), "1f1b", CASES[2]),
            ),
        ),
        (
            4,
            (
                ((4, 1, 1, 1), "1f1b", CASES[0]),
                ((2, 1, 2, 1), "1f1b", CASES[3]),
                ((2, 2, 1, 1), "1f1b", CASES[2]),
                ((2, 1, 1, 2), "1f1b", CASES[5]),
            ),
        ),
    ],
)
def test_replicas_that_share_a_micro_batch_give_the_same_gradients(ranks, runs):
    results = run_ranks(run_changed, ranks, runs, MergingDataset, process_group=False)
    for index, (_, _, case) in enumerate(runs):
        check_equal([rank[index] for rank in results], case)


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        (2, (((2, 1, 1, 1), "1f1b", CASES[0]), ((2, 1, 1, 1), "1f1b", CASES[3]))),
        (
            4,
            (
                ((4, 1, 1, 1), "1f1b", CASES[1]),
                ((2, 2, 1, 1), "1f1b", CASES[2]),
                ((2, 2, 1, 1), "1f1b", CASES[0]),
                ((2, 1, 2, 1), "1f1b", CASES[4]),
            ),
        ),
    ],
)
def test_shared_slices_give_the_same_gradients(ranks, runs):
    """Slices whose keys are kept over several replicas, beside slices of one replica alone."""
    results = run_ranks(run_changed, ranks, runs, SlicingAndMergingDataset, process_group=False)
    for index, (_, _, case) in enumerate(runs):
        check_equal([rank[index] for rank in results], case)
