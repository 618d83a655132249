"""Pulls parameters to the pipelines of a step, and pushes their gradients back.

A :class:`.Redistribution` says what every rank sends to every other in each turn; here it is sent.
A turn is one uneven all-to-all over all ranks, or, over several nodes, two hops: one all-to-all
over the rail (ranks of equal place in their nodes) and one within the node. A rank that lacks
nothing joins with nothing to receive, so that all ranks post the same collectives in one order.

A :class:`Pull` posts all of a step's parameters at once. A :class:`Push` posts turns from the last
to the first, each when its gradients are complete, and waits for none before :meth:`.Push.finish`.
Ranks are summed in their order: a step gives the same bits again, and so do copies of a shard.

A second hop is posted as soon as the first has arrived, beside the step's own thread
(:class:`.Forwarder`): pipeline ranks of one node that wait for each other's activations would else
wait for each other's second hop too. Rails and nodes have process groups of their own. A rank
begins to push when its forwarder has posted all that it pulls, so that every group carries pulls by
turn, and then pushes from the last turn to the first.

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

    ``shards`` has this rank's shards by name in the whole model, ``dtype`` is that of the step.
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

    ``sums`` has the gradients of this rank's own micro-batches by name in the whole model, each
    complete when its turn is posted.
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
        """Send the gradients of the next turn, and let go of them."""
        turn = self.next
        running = self._send(turn, self._own.hops - 1, self._sums)
        if turn < len(self._buckets):
            self._sums.drop(self._buckets[turn])
        self._running.append(self._groups.after(partial(self._hand_on, turn, running)))

    def finish(self) -> dict[str, Tensor]:
        """Wait for all ranks; the summed gradient of each trained shard of this rank."""
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
