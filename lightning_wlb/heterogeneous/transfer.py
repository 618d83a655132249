"""Parameters on their way to the pipelines of a step, and gradients on their way back.

Where a step's pipelines differ from the mesh's, a :class:`.Redistribution` says what every rank
sends to every other; here it is sent. Each of its turns is one uneven all-to-all over all ranks,
or, over several nodes, one over the rail and one in the node. A rank that lacks nothing joins it
with nothing to receive, so that all ranks post the same collectives in the same order whatever
their stages are.

A :class:`Pull` posts all of a step's parameters at once. A :class:`Push` posts turns from the last
to the first, each when its gradients are complete, and waits for none before :meth:`.Push.finish`.
A sum is made in the order of ranks: a step gives the same bits again, and copies of a shard get the
same bits.

Over two hops the second one of a turn is posted as soon as the first one has arrived, beside the
step (:class:`Forwarder`). It must not wait for the step's own thread: pipeline ranks of one node
that wait for each other's activations would wait for each other's part of the second hop too. A
rail and a node have process groups of their own. A rank's step begins to push when its forwarder
has posted all that it pulls, so that on every group each rank posts pulls by turn, and then pushes
from the last turn to the first.

Cost: that of the running exchanges, and a stage's sums until they have been sent. Not run on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from lightning_wlb.heterogeneous.planning.exchanges import Redistribution, TurnExchange
from lightning_wlb.heterogeneous.running_exchange import (
    BoxTensors,
    ExchangeGroups,
    ForwardedTensors,
    PieceTensors,
    RunningExchange,
)


class Pull:
    """One step's parameters, from the shards to this rank; collective over all ranks.

    Args:
        redistribution: of this rank.
        groups: for the ranks of each of its exchanges.
        shards: this rank's shard of each parameter that it has one of, by name in the whole model.
        dtype: of the parameters in the step.
        device: of this rank.
    """

    def __init__(
        self,
        redistribution: Redistribution,
        groups: ExchangeGroups,
        shards: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        own, self._given = redistribution, (dtype, device)
        self._buckets = own.buckets
        self._values = BoxTensors(own, own.buckets, shard=False)
        source = BoxTensors(own, range(len(own.weights.buckets)), shard=True, given=shards)
        groups.settle()
        running = [
            RunningExchange(own.exchange(turn, 0), groups, source, dtype, device)
            for turn in range(own.turns)
        ]
        middle = ForwardedTensors(dtype, device, zeros=False)

        def hand_out(turn: int, first: RunningExchange) -> RunningExchange:
            if own.hops == 1:
                return first
            first.arrive(middle)
            return RunningExchange(own.exchange(turn, 1), groups, middle, dtype, device)

        self._running = [groups.after(partial(hand_out, *each)) for each in enumerate(running)]

    def arrive(self, turn: int) -> dict[str, Tensor]:
        """Wait for a turn of this rank; its parameters by name in the whole model."""
        running, bucket = self._running[turn](), self._buckets[turn]
        self._values.make(bucket, *self._given, zeros=False)
        running.arrive(self._values)
        return self._values.of_bucket(bucket)

    def finish(self) -> None:
        """Wait for the turns in which this rank only sends."""
        for running in self._running[len(self._buckets) :]:
            running().arrive(self._values)


class Push:
    """One step's gradients, from this rank to the shards; collective over all ranks.

    Args:
        redistribution: of this rank, as ``groups`` and ``device`` for :class:`Pull`.
        groups: for the ranks of each of its exchanges.
        sums: the gradients of this rank's own micro-batches, by name in the whole model, complete
            when their turn is posted.
        dtype: of the sums.
        device: of this rank.
    """

    def __init__(
        self,
        redistribution: Redistribution,
        groups: ExchangeGroups,
        sums: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._own, self._groups, self._given = redistribution, groups, (dtype, device)
        self._buckets = redistribution.buckets
        self._sums = BoxTensors(
            redistribution, self._buckets, shard=False, trained=True, given=sums
        )
        self._middle = ForwardedTensors(dtype, device, zeros=True)
        self._running: list[Callable[[], RunningExchange]] = []
        groups.settle()

    @property
    def next(self) -> int:
        """The turn to be posted next; -1 when all have been."""
        return self._own.turns - 1 - len(self._running)

    def post(self) -> None:
        """Send the gradients of the next turn, which are not held from then on."""
        turn = self.next
        running = self._send(turn, self._own.hops - 1, self._sums)
        if turn < len(self._buckets):
            self._sums.drop(self._buckets[turn])
        self._running.append(self._groups.after(partial(self._hand_on, turn, running)))

    def finish(self) -> dict[str, Tensor]:
        """Wait for the sums of all ranks; those of each trained shard that this rank has."""
        buckets = range(len(self._own.weights.buckets))
        totals = BoxTensors(self._own, buckets, shard=True, trained=True)
        for bucket in buckets:
            totals.make(bucket, *self._given, zeros=True)
        for running in self._running:
            running().arrive(totals, add=True)
        return {
            name: total for bucket in buckets for name, total in totals.of_bucket(bucket).items()
        }

    def _hand_on(self, turn: int, running: RunningExchange) -> RunningExchange:
        if self._own.hops == 1:
            return running
        running.arrive(self._middle, add=True)
        return self._send(turn, 0, self._middle)

    def _send(self, turn: int, hop: int, source: PieceTensors) -> RunningExchange:
        ranks, out, into = self._own.exchange(turn, hop, push=True)
        back = TurnExchange(ranks, out=into, into=out)
        return RunningExchange(back, self._groups, source, *self._given)
