"""Choosing the least recomputation with which a step fits in memory.

A micro-batch holds its activations from its forward to its backward, or only some of them and
recomputes the rest (``MicroBatch.recompute``). :func:`settled` gives every micro-batch of a plan a
mode, such that no pipeline rank passes its memory limit and the step gets little longer.

The bytes that a rank holds during an action do not depend on times: they are a prefix sum over its
program, and largest in one of its backwards. So nothing is simulated. The search is greedy:

1. All micro-batches begin with ``"none"``. While a rank holds too much, one of the micro-batches
   that are open in its fullest backward is raised to a higher mode: the one that frees most of the
   excess for each nanosecond of recomputation, in a tie the first.
2. Every mode is lowered again as far as the step still fits, the most expensive first, because
   later raises may have made earlier ones unnecessary.
3. Step 2 is repeated from ``"none"``, ``"selective"`` and ``"full"`` for all micro-batches. Among
   the four results the one with the shortest estimated step is taken.

Replicas that share a micro-batch raise it together.

In a stage of one layer, recomputing that layer takes as much memory as holding it, so raising a
micro-batch adds to its own backward what it frees in others. The search may then miss modes that
fit, but only if the excess is less than a micro-batch's hidden states, and never if one mode for
all micro-batches fits. If nothing fits, the least bytes on the fullest rank decide.

Cost: some tenths of a millisecond per raised micro-batch, and the preparation of a simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lightning_wlb.plan import Recompute, ReplicaPlan
from lightning_wlb.prediction.micro_batch import MODES, MicroBatchCost
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step_totals import (
    ActionOrder,
    backwards_before,
    has_totals,
    held_besides,
    orders_of,
)
from lightning_wlb.schedule.actions import FORWARD, Action
from lightning_wlb.sharding.integer_ranges import Integers

Place = tuple[int, int]
"""A micro-batch: the index of its replica among those settled together, and its number there."""


def recomputing(replicas: Sequence[ReplicaPlan], mode: Recompute) -> list[ReplicaPlan]:
    """The same replicas with one mode for all micro-batches."""
    return [
        replica
        if all(each.recompute == mode for each in replica.forward)
        else replica.changed(lambda each: replace(each, recompute=mode))
        for replica in replicas
    ]


def settled(predictor: Predictor, replicas: Sequence[ReplicaPlan]) -> list[ReplicaPlan]:
    """The same replicas with the least recomputation that fits in memory.

    They share micro-batches only with each other. Their present modes are ignored.
    """
    costs = list(map(predictor.sizes, replicas))
    orders = orders_of(replicas) if has_totals(predictor) else None
    constant = predictor.memory.constant(costs)
    found = least_recomputation(predictor, replicas, costs, orders, constant)
    result = []
    for replica, of_replica in zip(replicas, found, strict=True):
        made = {
            each: replace(each, recompute=cost.recompute if each.slices else "none")
            for each, cost in zip(replica.forward, of_replica, strict=True)
        }
        result.append(replica.changed(made.__getitem__))
    return result


def least_recomputation(
    predictor: Predictor,
    replicas: Sequence[ReplicaPlan],
    costs: Sequence[Sequence[MicroBatchCost]],
    orders: Sequence[ActionOrder] | None,
    constant: Sequence[int],
) -> list[list[MicroBatchCost]]:
    """The costs with the least recomputation that fits in memory.

    Args:
        replicas: as for :func:`settled`.
        costs: [replicas][micro-batches]; their present modes are ignored.
        orders: :func:`.orders_of` the replicas; None if the predictor has no totals.
        constant: bytes that each rank always holds in the step (:meth:`.StepMemory.constant`).
    """
    memory, ranks = predictor.memory, predictor.latency.mesh.pipeline
    if orders is None:
        given = zip(*predictor.programs(replicas, costs), strict=True)
        backwards = [_of_programs(*each, constant, len(memory.parts)) for each in given]
    else:
        backwards = [
            _Backwards(
                *backwards_before(order, ranks),
                held_besides(memory, order, of_replica, constant).T.copy(),
            )
            for of_replica, order in zip(costs, orders, strict=True)
        ]
    accounts = [_Account(predictor, *each) for each in zip(costs, backwards, strict=True)]
    for group in _sharing(replicas):
        search = _Search({at: accounts[at] for at in group}, _alike(replicas, group))
        if search.excess > 0:
            search.run()
    return [
        [
            cost._replace(recompute=MODES[mode])
            for cost, mode in zip(of_replica, account.modes, strict=True)
        ]
        for of_replica, account in zip(costs, accounts, strict=True)
    ]


def _sharing(replicas: Sequence[ReplicaPlan]) -> list[list[int]]:
    """Numbers of the replicas, in groups that share micro-batches only with each other."""
    groups: dict[object, list[int]] = defaultdict(list)
    for at, replica in enumerate(replicas):
        # Sets of sharing replicas are aligned: of two that overlap, one contains the other.
        widest = max((each.replicas for each in replica.forward), key=len, default=())
        groups[widest if len(widest) > 1 else at].append(at)
    return list(groups.values())


def _alike(replicas: Sequence[ReplicaPlan], group: Sequence[int]) -> dict[Place, list[Place]]:
    """For each micro-batch of some replicas, all that must have its mode, itself included."""
    found: dict[object, list[Place]] = defaultdict(list)
    for at in group:
        for number, each in enumerate(replicas[at].forward):
            # Shared micro-batches come first, so each has the same number on all its replicas.
            owner = each.replicas if len(each.replicas) > 1 else at
            found[owner, number].append((at, number))
    return {place: places for places in found.values() for place in places}


@dataclass(frozen=True, eq=False)
class _Search:
    """Looks for the modes of replicas that share micro-batches only with each other."""

    accounts: dict[int, _Account]  # bytes on the ranks of each replica, by the replica's index
    alike: Mapping[Place, Sequence[Place]]  # for each micro-batch all that must have its mode

    @property
    def excess(self) -> int:
        """Bytes by which the fullest rank exceeds the usable memory; negative if it does not."""
        return max(account.excess for account in self.accounts.values())

    def run(self) -> None:
        """Give all micro-batches the modes of the best of four results."""
        results = []
        for mode in range(len(MODES)):
            for account in self.accounts.values():
                account.give([mode] * len(account.modes))
            results.append(self._lowered())
            if mode == 0:
                self._raise()
                results.append(self._lowered())
        _, best = min(results, key=lambda result: result[0])
        for at, modes in best.items():
            self.accounts[at].give(modes)

    def _lowered(self) -> tuple[tuple[bool, int], dict[int, list[int]]]:
        """Lower modes while the step still fits; returns a score (less is better) and the modes."""
        excess = self.excess
        if excess <= 0:
            self._lower()
        slowest = max(account.step_ns for account in self.accounts.values())
        score = excess > 0, excess if excess > 0 else slowest
        return score, {at: [*each.modes] for at, each in self.accounts.items()}

    def _raise(self) -> None:
        """Raise modes until every replica fits, or nothing more helps a replica's fullest rank."""
        for at, account in self.accounts.items():
            while account.excess > 0 and (found := account.best()) is not None:
                number, mode = found
                for other, _ in self.alike[at, number]:
                    changed = self.accounts[other]
                    changed.change(number, mode, changed.held_with(number, mode))

    def _lower(self) -> None:
        """Lower modes while the step still fits, the most expensive first."""
        spent = {at: account.spent_ns for at, account in self.accounts.items()}
        first = sorted({places[0] for places in self.alike.values()})
        first.sort(key=lambda place: -spent[place[0]][place[1]])
        for place in first:
            at, number = place
            places = self.alike[place]
            for mode in range(self.accounts[at].modes[number]):
                accounts = [self.accounts[at] for at, _ in places]
                held = [account.held_with(number, mode) for account in accounts]
                if all(account.fits(each) for account, each in zip(accounts, held, strict=True)):
                    for account, each in zip(accounts, held, strict=True):
                        account.change(number, mode, each)
                    break


class _Backwards(NamedTuple):
    """When a replica's backwards run, and the bytes held in each that do not depend on modes."""

    first: Integers  # [stages, micro-batches], backwards that a rank has run before each forward
    last: Integers  # [stages, micro-batches], backwards that a rank has run before each backward
    held: Integers  # [ranks, backwards], bytes that a rank holds besides what forwards have saved


def _of_programs(
    programs: Sequence[Sequence[Action]],
    freed: Mapping[Action, int],
    constant: Sequence[int],
    stages: int,
) -> _Backwards:
    """The backwards of a replica, from its ranks' programs and what their actions free."""
    ranks = len(programs)
    passes = len(programs[0]) // 2  # of a rank
    first, last = np.zeros((2, stages, passes * ranks // stages), np.int64)
    bytes_held = np.zeros((ranks, passes), np.int64)
    for rank, program in enumerate(programs):
        held, done = constant[rank], 0
        for action in program:
            if action.kind == FORWARD:
                first[action.stage, action.micro_batch] = done
            else:
                last[action.stage, action.micro_batch] = done
                bytes_held[rank, done] = held
                done += 1
            # As in the simulator: a forward's at its begin, a backward's at its end.
            held -= freed.get(action, 0)
    return _Backwards(first, last, bytes_held)


class _Account:
    """Bytes that the ranks of one replica hold in each of their backwards, with the present modes.

    Attributes:
        modes: the index of each micro-batch's mode in :data:`.MODES`.
    """

    def __init__(
        self, predictor: Predictor, costs: Sequence[MicroBatchCost], backwards: _Backwards
    ) -> None:
        memory = predictor.memory
        self._limit = predictor.usable_bytes
        self._first, self._last, self._without = backwards
        count = len(costs)
        self._ranks = len(self._without)
        # The backwards in which a micro-batch is open on any stage.
        begins, ends = self._first.min(axis=0), self._last.max(axis=0) + 1
        self._windows = list(map(slice, begins.tolist(), ends.tolist()))
        # [modes, micro-batches, stages]
        self._saved = np.stack([memory.saved(costs, mode) for mode in MODES])
        self._inside = np.stack([memory.inside(costs, mode) for mode in MODES])
        kinds = np.array(list(predictor.latency.shape.kinds.values()))
        layers = np.array([[times.layer_ns for times in cost.by_mode] for cost in costs], np.int64)
        self._times_ns = (layers.reshape(count, len(MODES), len(kinds), 2).sum(axis=3) @ kinds).T
        self._costs_ns = self._times_ns - self._times_ns[0]
        self._bytes: dict[int, Integers] = {}
        self.give([0] * count)

    @property
    def excess(self) -> int:
        """Bytes by which the fullest rank exceeds the usable memory; negative if it does not."""
        return int(self._held.max(initial=0)) - self._limit

    @property
    def step_ns(self) -> int:
        """An estimate of the step's length on all ranks: every action, and a pipeline's bubble."""
        spent = self._times_ns[self.modes, np.arange(len(self.modes))]
        return int(spent.sum() + (self._ranks - 1) * spent.max(initial=0))

    @property
    def spent_ns(self) -> list[int]:
        """The time that the mode of each micro-batch adds."""
        spent: list[int] = self._costs_ns[self.modes, np.arange(len(self.modes))].tolist()
        return spent

    def give(self, modes: Sequence[int]) -> None:
        """Give every micro-batch a mode."""
        self.modes = list(modes)
        numbers = np.arange(len(modes))
        saved, inside = self._saved[self.modes, numbers].T, self._inside[self.modes, numbers].T
        stages, backwards = len(saved), self._without.shape[1]
        stage = np.arange(stages)[:, None]
        opened = np.zeros((stages, backwards + 1), np.int64)
        np.add.at(opened, (stage, self._first), saved)
        np.subtract.at(opened, (stage, self._last + 1), saved)
        held = np.cumsum(opened, axis=1)[:, :backwards]
        held[stage, self._last] += inside
        self._held = self._without + self._of_ranks(held)

    def held_with(self, number: int, mode: int) -> Integers:
        """Bytes held if a micro-batch had another mode, [ranks, backwards of its window]."""
        return self._held[:, self._windows[number]] + self._added(number, mode)

    def change(self, number: int, mode: int, held: Integers) -> None:
        """Give a micro-batch another mode; ``held`` is :meth:`held_with` that mode."""
        self._held[:, self._windows[number]] = held
        self.modes[number] = mode

    def fits(self, held: Integers) -> bool:
        """Whether the step still fits after a change to ``held``, if it fits now."""
        return bool(held.max() <= self._limit)

    def best(self) -> tuple[int, int] | None:
        """The micro-batch to raise next, and the mode to give it; None if none would help."""
        rank, at = np.unravel_index(int(self._held.argmax()), self._held.shape)
        own = slice(int(rank), None, self._ranks)  # stages of the rank
        opened = ((self._first[own] <= at) & (at <= self._last[own])).T
        running = (self._last[own] == at).T
        numbers = np.arange(len(self.modes))
        saved, inside = self._saved[:, :, own], self._inside[:, :, own]
        bytes_of = (saved * opened + inside * running).sum(2)  # [modes, micro-batches]
        freed = np.minimum(bytes_of[self.modes, numbers] - bytes_of, self.excess)
        spent = np.maximum(self._costs_ns - self._costs_ns[self.modes, numbers], 1)
        higher = np.arange(len(MODES))[:, None] > np.array(self.modes)
        worth = np.where(higher & (freed > 0), freed / spent, 0.0).T
        number, mode = divmod(int(worth.argmax()), len(MODES))
        return (number, mode) if worth[number, mode] > 0 else None

    def _added(self, number: int, mode: int) -> Integers:
        """Bytes that a mode adds to what ranks hold, [ranks, backwards of its window]."""
        if number not in self._bytes:
            window = self._windows[number]
            places = np.arange(window.start, window.stop)
            first, last = self._first[:, number, None], self._last[:, number, None]
            self._bytes[number] = self._of_ranks(
                self._saved[:, number, :, None] * ((first <= places) & (places <= last))
                + self._inside[:, number, :, None] * (places == last)
            )
        of_modes = self._bytes[number]
        added: Integers = of_modes[mode] - of_modes[self.modes[number]]
        return added

    def _of_ranks(self, of_stages: Integers) -> Integers:
        """Sums over the stages of each rank; stage s is on rank s % ranks."""
        *more, stages, backwards = of_stages.shape
        if stages == self._ranks:
            return of_stages
        summed: Integers = of_stages.reshape(
            *more, stages // self._ranks, self._ranks, backwards
        ).sum(axis=-3)
        return summed
