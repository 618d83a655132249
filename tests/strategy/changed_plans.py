"""Plans rewritten at random, in every legal way that the planner's own would not show in a test."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.loader import StepDataset
from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice, StepPlan
from lightning_wlb.planning.planner import Release
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.sharding import ADAPTIVE, layout
from tests.strategy.harness import WINDOW, Case, documents

MICRO_BATCHES = 5

Change = Callable[[StepPlan, Any, str], StepPlan]
"""(plan, where the rank stands, sharding) -> the same pieces in another plan."""


def rows_of(parts: Sequence[Slice], replicas: int, rank: Any, sharding: str) -> int:
    """Rows of each rank that such a micro-batch has."""
    lengths = [part.tokens for part in parts]
    return layout(sharding, lengths, rank.mesh.context * replicas, rank.mesh.tensor).rows


def replica_of(
    groups: Sequence[tuple[Sequence[Slice], tuple[int, ...]]], rank: Any, sharding: str
) -> ReplicaPlan:
    """A symmetric replica from the slices of each micro-batch and the replicas that share it.

    Micro-batches recompute nothing, feed-forward halves and layers in turn.
    """
    slices: list[Slice] = []
    forward = []
    for parts, owners in groups:
        members = tuple(range(len(slices), len(slices) + len(parts)))
        rows = rows_of(parts, len(owners), rank, sharding)
        forward.append(MicroBatch(members, sharding, rows, owners, MODES[len(forward) % 3]))
        slices += parts
    return ReplicaPlan(tuple(slices), tuple(forward))


def sliced(plan: StepPlan, rank: Any, sharding: str) -> StepPlan:
    """The same pieces, cut at random and spread over more micro-batches, in legal order.

    The longest piece of a replica is in every micro-batch, with a first slice of one token.
    """
    generator = random.Random(plan.step)
    replicas = []
    for number, replica in enumerate(plan.replicas):
        groups: list[list[Slice]] = [[] for _ in range(MICRO_BATCHES)]
        longest = max(replica.slices, key=lambda part: part.tokens, default=None)
        for whole in replica.slices:
            count = generator.randint(1, min(MICRO_BATCHES, whole.tokens))
            cuts = generator.sample(range(whole.start + 1, whole.stop), count - 1)
            if whole == longest and whole.tokens >= MICRO_BATCHES:
                count = MICRO_BATCHES
                rest = generator.sample(range(whole.start + 2, whole.stop), count - 2)
                cuts = [whole.start + 1, *rest]
            edges = [whole.start, *sorted(cuts), whole.stop]
            first = generator.randint(0, MICRO_BATCHES - count)
            for index in range(count):
                part = Slice(whole.document, whole.origin, edges[index], edges[index + 1])
                groups[first + index].append(part)
        replicas.append(
            replica_of([(parts, (number,)) for parts in groups if parts], rank, sharding)
        )
    return replace(plan, replicas=tuple(replicas), cap=plan.tokens).validate()


def merged(plan: StepPlan, rank: Any, sharding: str) -> StepPlan:
    """The same pieces, the longest of each aligned pair or four of replicas shared by them."""
    count = len(plan.replicas) if plan.step % 2 else 2
    replicas: list[ReplicaPlan] = []
    for first in range(0, len(plan.replicas), count):
        members = plan.replicas[first : first + count]
        pieces = [part for replica in members for part in replica.slices]
        names = tuple(range(first, first + count))
        shared = [max(pieces, key=lambda part: part.tokens)] if pieces else []
        for number, replica in zip(names, members, strict=True):
            groups: list[tuple[list[Slice], tuple[int, ...]]] = [(shared, names)] if shared else []
            for micro_batch in replica.forward:
                rest = [part for part in replica.slices_of(micro_batch) if part not in shared]
                groups += [(rest, (number,))] if rest else []
            replicas.append(replica_of(groups, rank, sharding))
    return replace(plan, replicas=tuple(replicas)).validate()


def sliced_and_merged(plan: StepPlan, rank: Any, sharding: str) -> StepPlan:
    """As :func:`merged`, with every piece cut in up to three consecutive micro-batches."""
    generator = random.Random(plan.step)
    plan = merged(plan, rank, sharding)
    cuts: dict[Slice, list[Slice]] = {}
    replicas = []
    for number, replica in enumerate(plan.replicas):
        groups: list[tuple[list[Slice], tuple[int, ...]]] = []
        # Own micro-batches are only cut where the replica is odd, so that warm-ups differ.
        for micro_batch in replica.forward:
            (*rest, last) = replica.slices_of(micro_batch)
            parts = [[*rest, last]]
            if (len(micro_batch.replicas) > 1 or number % 2) and last.tokens >= 3:
                if last not in cuts:
                    at_token = sorted(generator.sample(range(last.start + 1, last.stop), 2))
                    edges = [last.start, *at_token, last.stop]
                    cuts[last] = [last._replace(start=a, stop=b) for a, b in pairwise(edges)]
                first, *others = cuts[last]
                parts = [[*rest, first], *([other] for other in others)]
            groups += [(each, micro_batch.replicas) for each in parts]
        replicas.append(replica_of(groups, rank, sharding))
    return replace(plan, replicas=tuple(replicas)).validate()


def with_all_modes(plan: StepPlan, *_: Any) -> StepPlan:
    """The same plan, with another recomputation for each micro-batch in turn."""
    replicas = []
    for replica in plan.replicas:
        mode = {each.slices: MODES[at % 3] for at, each in enumerate(replica.forward)}
        made = {each: replace(each, recompute=mode[each.slices]) for each in replica.forward}
        replicas.append(replica.changed(made.__getitem__))
    return replace(plan, replicas=tuple(replicas)).validate()


CHANGES: dict[str, Change] = {
    "recomputing": with_all_modes,
    "sliced": sliced,
    "merged": merged,
    "sliced and merged": sliced_and_merged,
}


class ChangingPlanner:
    """A planner whose plans are rewritten."""

    def __init__(self, planner: Any, change: Callable[[StepPlan], StepPlan]) -> None:
        self._planner, self._change = planner, change

    def place(self, release: Release) -> StepPlan:
        return self._change(self._planner.place(release))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


class ChangingDataset(StepDataset):
    change: Change

    def planner(self) -> Any:
        return ChangingPlanner(
            super().planner(), lambda plan: self.change(plan, self.rank, self.sharding)
        )


class ChangingData(WLBDataModule):
    change: Change

    def _dataset(self, store, settings):
        dataset = super()._dataset(store, settings)
        dataset.__class__ = type(
            "Changing", (ChangingDataset,), {"change": staticmethod(self.change)}
        )
        return dataset


def changed_data(case: Case, change: str, **options: Any) -> WLBDataModule:
    """The case's documents in rewritten plans."""
    defaults: dict[str, Any] = {
        "context_window": WINDOW,
        "micro_batches": 3,
        "num_workers": 0,
        "packing": case.packing,
        # Plans made here name a sharding; the adaptive choice is the planner's.
        "sharding": "hybrid" if case.sharding == ADAPTIVE else case.sharding,
    }
    data = ChangingData(documents(case.masked), **(defaults | options))
    data.change = CHANGES[change]
    return data
