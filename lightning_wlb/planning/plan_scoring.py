"""The time and the memory of candidate plans, by which packings choose between them.

:class:`WorkScorer` knows no device. It simulates exact work, spread evenly over the stages, with an
overhead for every action, which stands for the fixed cost of a pass through a stage and for the
lower efficiency of smaller kernels. Without it the smallest micro-batches would always win.

:class:`ProfileScorer` predicts from a device profile, within the device's memory. It knows how slow
kernels and links are for small micro-batches, and takes several times as long.

Both score micro-batches that are not laid out yet (:func:`.laid_out`). For one stage per rank (with
a profile also only for 1F1B) they use :mod:`~lightning_wlb.schedule.fast_simulator`, which takes a
tenth of the time of :mod:`~lightning_wlb.schedule.simulator`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

from lightning_wlb.cost.flops import Work, causal_pairs
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import ActivationCheckpointing, MicroBatch, ReplicaPlan
from lightning_wlb.planning.dp_merge import shared_work
from lightning_wlb.planning.tuning import CLEARLY_PERCENT
from lightning_wlb.prediction.micro_batch import modes_of
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.recompute import least_recomputation, recomputing, settled
from lightning_wlb.prediction.step_totals import ReplicaTotals, StepTimes, StepTotals, has_totals
from lightning_wlb.schedule.actions import FORWARD, Action
from lightning_wlb.schedule.fast_simulator import Pipeline, members_of, step_ends
from lightning_wlb.schedule.packflow import backward_orders, packflow, planned_warm_up
from lightning_wlb.schedule.simulator import simulate_replicas

MOST_JUDGED = 1 << 10
"""Replicas whose totals are remembered: enough for a step's candidates on a thousand ranks."""


_Fitting = tuple[tuple[ReplicaTotals, ...], tuple[int, ...]]
"""Replicas whose recomputation is chosen together, and the bytes that ranks hold all the time."""


class PlanScore(NamedTuple):
    """The time and memory that a scorer predicts for some replicas."""

    time: int  #: time of the slowest replica, in the scorer's unit
    #: the most that a rank holds at once, in the unit of the scorer's ``limit``; may be an upper
    #: bound where that does not exceed the limit
    peak: int


class Placement(NamedTuple):
    """Where the pieces of a step are to run, and how plans are compared."""

    mesh: Mesh  #: the ranks that the step runs on
    sharding: str  #: the sharding that the user asked for; see :func:`.replica_plan`
    scorer: PlanScorer  #: compares the plans of methods that try several


@dataclass(frozen=True)
class WorkScorer:
    """Scores replicas by exact work; it knows no device, so no recomputation and no end times."""

    work: Work  #: forward and backward work of the model
    mesh: Mesh  #: its pipeline ranks and virtual stages are simulated
    overhead: int = 0  #: what each action costs beside its work, in the unit of ``work``
    #: tokens that a rank may have open, counted once for each of its stages
    limit: int = sys.maxsize
    # Keyed by replica; the planner makes a new scorer for each step.
    _scores: dict[object, PlanScore] = field(default_factory=dict, init=False, compare=False)

    @property
    def longest(self) -> Sequence[int]:
        """Empty, as no device is known."""
        return ()

    def ends(self, replicas: Sequence[ReplicaPlan]) -> Sequence[int]:
        """Empty, as no device is known."""
        return ()

    def settled(self, replicas: Sequence[ReplicaPlan]) -> list[ReplicaPlan]:
        """The replicas unchanged."""
        return list(replicas)

    def __call__(self, replicas: Sequence[ReplicaPlan]) -> PlanScore:
        """The score of a step, whose time is in units of work as if each stage had all layers.

        The peak counts tokens of open micro-batches, once for each stage.

        Args:
            replicas: all of a step, or some that share no micro-batch with others; shared
                micro-batches must come first on all replicas that share them.
        """
        virtual = self.mesh.virtual_stages
        if virtual == 1 and not any(map(members_of, replicas)):
            alone = list(map(self._alone, replicas))
            return PlanScore(
                max((each.time for each in alone), default=0),
                max((each.peak for each in alone), default=0),
            )
        return self._together(replicas)

    def _alone(self, replica: ReplicaPlan) -> PlanScore:
        """The score of a replica that shares nothing, remembered for the score of the step."""
        key = _key(replica, estimated=True)
        if key not in self._scores:
            self._scores[key] = self._together([replica])
        return self._scores[key]

    def _together(self, replicas: Sequence[ReplicaPlan]) -> PlanScore:
        passes = [self._passes(replica) for replica in replicas]
        orders = backward_orders(replicas)
        ranks, virtual = self.mesh.pipeline, self.mesh.virtual_stages
        if virtual == 1:
            pipelines = [
                Pipeline(
                    [each.forward] * ranks,
                    [each.backward] * ranks,
                    [[0] * len(backward)] * ranks,
                    backward,
                    planned_warm_up(needs),
                    members_of(replica),
                )
                for each, (backward, needs), replica in zip(passes, orders, replicas, strict=True)
            ]
            peaks = [_most_open(*each) for each in zip(pipelines, passes, strict=True)]
            time = max((end for ends in step_ends(pipelines) for end in ends), default=0)
            return PlanScore(time, max(peaks, default=0))
        programs = [
            [packflow(rank, ranks, *order, virtual) for rank in range(ranks)] for order in orders
        ]
        steps = simulate_replicas(
            programs,
            lambda replica, action: passes[replica].of(action),
            changed_bytes=lambda replica, action: passes[replica].tokens[action.micro_batch],
            sharers=[replica.sharers for replica in replicas],
        )
        return PlanScore(steps[0].total_ns, max(peak for step in steps for peak in step.peak_bytes))

    def _passes(self, replica: ReplicaPlan) -> _Passes:
        each, overhead = self.mesh.virtual_stages, self.overhead
        found = [self._work(replica, micro_batch) for micro_batch in replica.forward]
        return _Passes(
            [forward // each + overhead for forward, _, _ in found],
            [backward // each + overhead for _, backward, _ in found],
            [tokens for _, _, tokens in found],
        )

    def _work(self, replica: ReplicaPlan, micro_batch: MicroBatch) -> tuple[int, int, int]:
        """Forward work, backward work and tokens of a micro-batch on one of its replicas."""
        # Attention pairs are counted once for both passes: this is a hot loop of `auto`.
        forward, both = self.work.forward, self.work.total
        window = forward.window
        tokens = pairs = 0
        for index in micro_batch.slices:
            _, origin, start, stop = replica.slices[index]
            tokens += stop - start
            pairs += causal_pairs(stop - start, start - origin, window)
        first = forward.per_token * tokens + forward.per_pair * pairs
        total = both.per_token * tokens + both.per_pair * pairs
        for (window, of_forward), (_, of_both) in zip(forward.narrower, both.narrower, strict=True):
            pairs = sum(
                causal_pairs(part.tokens, part.context, window)
                for part in replica.slices_of(micro_batch)
            )
            first += of_forward * pairs
            total += of_both * pairs
        members = len(micro_batch.replicas)
        if members > 1:
            total, first = shared_work(total, members), shared_work(first, members)
        return first, total - first, -(-tokens // members)


class _Passes(NamedTuple):
    """The micro-batches of a replica in forward order: times on one stage, and tokens."""

    forward: list[int]
    backward: list[int]
    tokens: list[int]

    def of(self, action: Action) -> int:
        passes = self.forward if action.kind == FORWARD else self.backward
        return passes[action.micro_batch]


def _most_open(pipeline: Pipeline, passes: _Passes) -> int:
    """Most tokens open on the first rank, which runs the most forwards before a backward."""
    order, planned = pipeline.order, pipeline.planned
    count, ranks = len(order), len(pipeline.forward)
    opened = [0, *accumulate(passes.tokens)]
    freed = [0, *accumulate(passes.tokens[place] for place in order)]
    return max(
        (opened[min(count, need + ranks - 1)] - freed[at] for at, need in enumerate(planned)),
        default=0,
    )


@dataclass(frozen=True)
class ProfileScorer:
    """Scores replicas by a device profile, in ns and bytes, under the device's memory."""

    predictor: Predictor  #: predicts steps of the model on the mesh
    #: what all micro-batches recompute; ``"auto"``: for each micro-batch the least that fits
    activation_checkpointing: ActivationCheckpointing = "auto"
    _totals_of: dict[object, ReplicaTotals] = field(default_factory=dict, init=False, compare=False)
    _fitting_of: dict[_Fitting, list[ReplicaTotals]] = field(
        default_factory=dict, init=False, compare=False
    )

    @property
    def limit(self) -> int:
        """Bytes of a device that may be filled."""
        return self.predictor.usable_bytes

    @cached_property
    def longest(self) -> Sequence[int]:
        """Tokens of the longest micro-batch that fits on a replica alone, by mode of recomputation.

        The least recomputation comes first; modes in which the state does not fit are left out.
        """
        modes = modes_of(self.activation_checkpointing)
        return [tokens for mode in modes if (tokens := self.predictor.longest_micro_batch(mode))]

    def __call__(self, replicas: Sequence[ReplicaPlan]) -> PlanScore:
        """The score of the step with the recomputation that :meth:`settled` would give it."""
        times, peak = self._totals(replicas)
        return PlanScore(times.total_ns, peak)

    def ends(self, replicas: Sequence[ReplicaPlan]) -> Sequence[int]:
        """The time at which each replica of a step has run all its actions, in ns."""
        return self._totals(replicas)[0].ends_ns

    def _totals(self, replicas: Sequence[ReplicaPlan]) -> tuple[StepTimes, int]:
        """When the replicas end, and the bytes of the fullest rank."""
        predictor, given = self.predictor, self.activation_checkpointing
        decides = given == "auto"
        replicas = recomputing(replicas, "none" if given == "auto" else given)
        if not has_totals(predictor):
            costs = list(map(predictor.costs, replicas))
            if decides:
                constant = predictor.memory.constant(costs)
                costs = least_recomputation(predictor, replicas, costs, None, constant)
            simulated = predictor.run(replicas, costs)
            ends = tuple(
                max((of_rank[-1].end_ns for of_rank in each.spans if of_rank), default=0)
                for each in simulated.simulations
            )
            return StepTimes(simulated.simulations[0].total_ns, ends), simulated.peak_bytes
        known = self._known(replicas)
        step = StepTotals(predictor, known)
        if decides and step.peak > self.limit:
            step = self._fitting(known, step)
        return step.times, step.peak

    def _fitting(self, replicas: Sequence[ReplicaTotals], step: StepTotals) -> StepTotals:
        """The step with the least recomputation that fits.

        If nothing is shared, what a replica recomputes depends only on its totals and on the bytes
        that ranks hold all the time. It is remembered by these, because a step is scored again for
        its replicas' ends, and steps that differ in one replica are compared.
        """
        fitting = self._fitting_of
        if len(fitting) + len(replicas) > MOST_JUDGED:
            fitting.clear()
        constant = tuple(step.constant)
        orders = dict(zip(replicas, step.orders, strict=True))
        groups = [tuple(replicas)] if step.shares else [(each,) for each in replicas]
        for group in groups:
            if (group, constant) not in fitting:
                found = least_recomputation(
                    self.predictor,
                    [each.replica for each in group],
                    [each.costs for each in group],
                    [orders[each] for each in group],
                    constant,
                )
                fitting[group, constant] = [
                    replace(each, costs=costs, alike=each)
                    for each, costs in zip(group, found, strict=True)
                ]
        return StepTotals(
            self.predictor, list(chain.from_iterable(fitting[group, constant] for group in groups))
        )

    def settled(self, replicas: Sequence[ReplicaPlan]) -> list[ReplicaPlan]:
        """The replicas with the least recomputation that fits, or with the given recomputation."""
        predictor = self.predictor
        if self.activation_checkpointing != "auto":
            return recomputing(replicas, self.activation_checkpointing)
        if has_totals(predictor):
            without = recomputing(replicas, "none")
            clear = CLEARLY_PERCENT * self.limit // 100
            if StepTotals(predictor, self._known(without, estimated=True)).peak <= clear:
                return without
        return settled(predictor, replicas)

    def _known(
        self, replicas: Sequence[ReplicaPlan], *, estimated: bool = False
    ) -> list[ReplicaTotals]:
        """The totals of each replica, remembered: replicas are scored alone, then in their step."""
        known = self._totals_of
        if len(known) + len(replicas) > MOST_JUDGED:
            known.clear()
        keys = [_key(replica, estimated) for replica in replicas]
        for key, replica in zip(keys, replicas, strict=True):
            if key not in known:
                costs = self.predictor.costs(replica, estimated=estimated)
                known[key] = ReplicaTotals(self.predictor, replica, costs)
        return [known[key] for key in keys]


PlanScorer = WorkScorer | ProfileScorer
"""Predicts the step of some replicas, and says how much a rank may hold (``limit``)."""


def _key(replica: ReplicaPlan, estimated: bool) -> object:
    """All that the totals of a replica depend on; its number only where it shares micro-batches."""
    return (
        replica.slices,
        tuple(
            [
                (each.slices, each.recompute, "" if estimated else each.sharding, each.replicas[1:])
                for each in replica.forward
            ]
        ),
    )
