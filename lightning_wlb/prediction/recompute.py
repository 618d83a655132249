"""The least recomputation with which a step fits in memory.

A micro-batch holds its activations from its forward to its backward, or holds less of them and
computes the rest again (``MicroBatch.recompute``). Here every micro-batch of a plan gets a mode,
such that each pipeline rank stays within the memory that may be filled, at little time.

What a rank holds while it runs an action does not depend on times: it is a prefix sum over its
program, and largest in one of its backwards. So nothing is simulated. All micro-batches begin with
``"none"``. While a rank holds too much, the mode of one of the micro-batches that are open in its
fullest backward is raised: the one that frees most of the excess for each nanosecond of
recomputation, the first of equal ones. Then every raised one is lowered again as far as the step
still fits, the dearest first, because what was raised later may have made it needless.

Replicas raise a micro-batch that they share together. The micro-batches of an asymmetric plan share
slices, so that all of a replica's get the same mode.

Where a stage has one layer, computing that layer again takes as much memory as holding it, so that
raising a micro-batch adds to its own backward what it frees from others. A step that fits by
another choice of modes can then be missed by less than a micro-batch's hidden states; but one that
fits with the same mode for all never is. Where nothing fits the fullest rank holds the least that
was found.

Cost: about 0.1 ms per micro-batch that is raised, beside what preparing a simulation takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lightning_wlb.plan import Recompute, ReplicaPlan
from lightning_wlb.prediction.predictor import Predictor, PreparedReplicas
from lightning_wlb.prediction.step import MODES
from lightning_wlb.schedule.actions import FORWARD

Place = tuple[int, int]
"""A replica by its place among those that are settled together, and a micro-batch by number."""


def recomputing(replicas: Sequence[ReplicaPlan], mode: Recompute) -> list[ReplicaPlan]:
    """The same replicas, all of whose micro-batches recompute the same."""
    return [
        ReplicaPlan(
            replica.slices,
            tuple(replace(each, recompute=mode) for each in replica.forward),
            tuple(replace(each, recompute=mode) for each in replica.backward),
        )
        for replica in replicas
    ]


def settled(predictor: Predictor, replicas: Sequence[ReplicaPlan]) -> list[ReplicaPlan]:
    """The same replicas with the least recomputation that fits in memory.

    Args:
        predictor: of the model on the mesh.
        replicas: those that share micro-batches share them with each other only; what they
            recompute so far does not matter.
    """
    step = least_recomputation(predictor, replicas)
    result = []
    for replica, executed, costs in zip(replicas, step.executed, step.costs, strict=True):
        modes: dict[int, Recompute] = {}
        for unit, cost in zip(executed.forward, costs, strict=True):
            modes.update(dict.fromkeys(unit.slices, cost.recompute))
        forward, backward = (
            tuple(
                replace(each, recompute=modes[each.slices[0]] if each.slices else "none")
                for each in micro_batches
            )
            for _, micro_batches in replica.passes
        )
        result.append(ReplicaPlan(replica.slices, forward, backward))
    return result


def least_recomputation(predictor: Predictor, replicas: Sequence[ReplicaPlan]) -> PreparedReplicas:
    """The replicas prepared for a simulation, with the least recomputation that fits in memory.

    The arguments are those of :func:`.settled`.
    """
    step = predictor.prepare(recomputing(replicas, "none"))
    constant = predictor.memory.constant(step.costs)
    accounts = [_Account(predictor, step, at, constant) for at in range(len(replicas))]
    if all(account.excess <= 0 for account in accounts):
        return step
    together = _together(replicas, step.executed)
    _raise(accounts, together)
    if all(account.excess <= 0 for account in accounts):
        _lower(accounts, together)
    else:
        _choose_one(accounts)
    costs = [
        [
            cost._replace(recompute=MODES[mode])
            for cost, mode in zip(of_replica, account.modes, strict=True)
        ]
        for of_replica, account in zip(step.costs, accounts, strict=True)
    ]
    return step._replace(costs=costs)


def _together(
    replicas: Sequence[ReplicaPlan], executed: Sequence[ReplicaPlan]
) -> dict[Place, list[Place]]:
    """For each micro-batch all those that have the same mode, itself among them."""
    groups: dict[object, list[Place]] = defaultdict(list)
    for at, (planned, units) in enumerate(zip(replicas, executed, strict=True)):
        for number, unit in enumerate(units.forward):
            shared = len(unit.replicas) > 1  # and so first on all that share it
            alike = number if planned is units else -1
            groups[unit.replicas if shared else at, alike].append((at, number))
    return {place: group for group in groups.values() for place in group}


def _raise(accounts: Sequence[_Account], together: Mapping[Place, Sequence[Place]]) -> None:
    """Raise modes until every replica fits, or until nothing more helps its fullest rank."""
    for at, account in enumerate(accounts):
        while account.excess > 0 and (found := account.best()) is not None:
            number, mode = found
            _change(accounts, together[at, number], mode)


def _lower(accounts: Sequence[_Account], together: Mapping[Place, Sequence[Place]]) -> None:
    """Lower raised modes as far as all still fits, the dearest first."""

    def cost(place: Place) -> int:
        at, number = place
        return int(accounts[at].costs_ns[accounts[at].modes[number], number])

    raised = {
        together[at, number][0]: None
        for at, account in enumerate(accounts)
        for number in np.flatnonzero(account.modes).tolist()
    }
    for place in sorted(raised, key=lambda place: (-cost(place), place)):
        group = together[place]
        before = int(accounts[place[0]].modes[place[1]])
        for mode in range(before):
            _change(accounts, group, mode)
            if all(accounts[at].excess <= 0 for at, _ in group):
                break
        else:
            _change(accounts, group, before)


def _choose_one(accounts: Sequence[_Account]) -> None:
    """Give all the same mode, where its fullest rank holds less than with the modes found."""

    def give(modes: Sequence[Sequence[int]]) -> int:
        for account, of_replica in zip(accounts, modes, strict=True):
            for number, mode in enumerate(of_replica):
                account.change(number, mode)
        return max(account.excess for account in accounts)

    found = [account.modes.tolist() for account in accounts]
    same = ([[mode] * len(each) for each in found] for mode in range(len(MODES)))
    give(min([found, *same], key=give))


def _change(accounts: Sequence[_Account], group: Sequence[Place], mode: int) -> None:
    for at, number in group:
        accounts[at].change(number, mode)


class _Account:
    """What the ranks of one replica hold in each of their backwards.

    Attributes:
        modes: of each micro-batch, its place in :data:`.MODES`.
        costs_ns: int64 [modes, micro-batches], what each mode adds to the time of the model.
    """

    def __init__(
        self, predictor: Predictor, step: PreparedReplicas, at: int, constant: Sequence[int]
    ) -> None:
        unit = predictor.latency.mesh.tensor
        memory, costs, freed = predictor.memory, step.costs[at], step.freed[at]
        self._limit = predictor.usable_bytes
        stages, count = len(memory.parts), len(costs)
        self._ranks = len(step.programs[at])
        # The backwards of a rank that are done before a forward, and before a backward.
        self._first = np.zeros((stages, count), np.int64)
        self._last = np.zeros((stages, count), np.int64)
        self._held = np.zeros((self._ranks, stages // self._ranks * count), np.int64)
        for rank, program in enumerate(step.programs[at]):
            held, done = constant[rank], 0
            for action in program:
                free = freed.get(action, 0)
                held -= min(free, 0)  # what it leaves for others is there from its begin
                if action.kind == FORWARD:
                    self._first[action.stage, action.micro_batch] = done
                else:
                    self._last[action.stage, action.micro_batch] = done
                    self._held[rank, done] = held
                    done += 1
                held -= max(free, 0)
        self._saved = np.zeros((len(MODES), stages, count), np.int64)
        self._inside = np.zeros_like(self._saved)
        rows, kept = (
            np.array([getattr(cost, name) for cost in costs], np.int64) // unit
            for name in ("rows", "kept_rows")
        )
        for stage, parts in enumerate(memory.parts):
            if (like := memory.parts.index(parts)) < stage:
                self._saved[:, stage] = self._saved[:, like]
                self._inside[:, stage] = self._inside[:, like]
                continue
            for mode, name in enumerate(MODES):
                # Rows are multiples of the unit, in which both are linear.
                each = memory.model.micro_batch_bytes(parts, unit, name)
                keys = memory.model.kept_keys_bytes(parts, unit, name)
                self._saved[mode, stage] = rows * each + kept * keys
                self._inside[mode, stage] = [
                    memory.model.transient_bytes(parts, cost.rows, cost.keys, name)
                    for cost in costs
                ]
        layers = predictor.latency.shape.kinds.values()
        times = np.array(
            [
                [
                    sum(
                        number * of_kind[True]
                        for number, of_kind in zip(layers, times.layer_ns, strict=True)
                    )
                    for times in cost.by_mode
                ]
                for cost in costs
            ],
            np.int64,
        ).reshape(count, len(MODES))
        self.costs_ns = (times - times[:, :1]).T
        self.modes = np.zeros(count, np.int64)
        for number in range(count):
            self._hold(number, 1)

    @property
    def excess(self) -> int:
        """Bytes by which the fullest rank is above what may be filled; negative where it is not."""
        return int(self._held.max(initial=0)) - self._limit

    def change(self, number: int, mode: int) -> None:
        """Give a micro-batch another mode."""
        self._hold(number, -1)
        self.modes[number] = mode
        self._hold(number, 1)

    def best(self) -> tuple[int, int] | None:
        """The micro-batch to raise next, and the mode to give it; None where none would help."""
        rank, at = np.unravel_index(int(self._held.argmax()), self._held.shape)
        own = slice(int(rank), None, self._ranks)  # stages of the rank
        opened = (self._first[own] <= at) & (at <= self._last[own])
        running = self._last[own] == at
        numbers = np.arange(len(self.modes))
        saved, inside = self._saved[:, own], self._inside[:, own]
        bytes_of = (saved * opened + inside * running).sum(1)  # of modes and micro-batches
        freed = np.minimum(bytes_of[self.modes, numbers] - bytes_of, self.excess)
        spent = np.maximum(self.costs_ns - self.costs_ns[self.modes, numbers], 1)
        higher = np.arange(len(MODES))[:, None] > self.modes
        worth = np.where(higher & (freed > 0), freed / spent, 0.0).T
        number, mode = divmod(int(worth.argmax()), len(MODES))
        return (number, mode) if worth[number, mode] > 0 else None

    def _hold(self, number: int, sign: int) -> None:
        mode = self.modes[number]
        for stage, (first, last) in enumerate(
            zip(self._first[:, number], self._last[:, number], strict=True)
        ):
            of_rank = self._held[stage % self._ranks]
            of_rank[first : last + 1] += sign * self._saved[mode, stage, number]
            of_rank[last] += sign * self._inside[mode, stage, number]
