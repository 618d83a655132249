"""Parameters on their way to the pipelines of a step, and gradients on their way back.

Where a step's pipelines differ from the mesh's, a :class:`~lightning_wlb.heterogeneous.links.Link`
says what
every rank sends to every other; here it is sent. Each slot of the link is one uneven all-to-all
over all ranks, or, over several nodes, one over the rail and one in the node. A rank that lacks
nothing joins it with nothing to receive, so that all ranks post the same collectives in the same
order whatever their stages are.

A :class:`Pull` posts all of a step's parameters at once. A :class:`Push` posts slots from the last
to the first, each when its gradients are complete, and waits for none before :meth:`.Push.finish`.
A sum is made in the order of ranks: a step gives the same bits again, and copies of a parameter at
rest get the same bits.

Over two hops the second one of a slot is posted as soon as the first one has arrived, beside the
step (:mod:`.relay`). It must not wait for the step's own thread: pipeline ranks of one node that
wait for each other's activations would wait for each other's part of the second hop too. A rail
and a node have process groups of their own. A rank's step begins to push when its relay has posted
all that it pulls, so that on every group each rank posts pulls by slot, and then pushes from the
last slot to the first.

Cost: beside what the link counts, what is copied and held on the way (:mod:`.posts`). Not run on
CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from lightning_wlb.distributed.device_mesh import is_cuda_over_gloo, set_timeout
from lightning_wlb.distributed.process_groups import connect_all, kept, own_group
from lightning_wlb.heterogeneous.layouts import Weights
from lightning_wlb.heterogeneous.links import Exchange, Link
from lightning_wlb.heterogeneous.posts import Held, Middle, Post, Views
from lightning_wlb.heterogeneous.relay import Relay, done
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.tensor_parallel import placement_of


@dataclass(frozen=True, eq=False)
class Groups:
    """What the exchanges of a rank's links travel over, and nothing else does.

    Args:
        made: global ranks, among them this one -> their process group.
        relay: makes the second hop; None: there is one hop.
    """

    made: Mapping[range, dist.ProcessGroup]
    relay: Relay | None = None

    def settle(self) -> None:
        """Wait until the relay posts nothing, so that this thread may."""
        if self.relay is not None:
            self.relay.settle()

    def set_timeout(self, timeout: timedelta) -> None:
        """Let any operation wait so long."""
        set_timeout(timeout, *self.made.values())


def weights_of(model: Decoder, sizes: Sequence[int]) -> Weights:
    """The parameters of a whole model, as links see them.

    Args:
        model: whole, on any device.
        sizes: tensor-parallel sizes of the mesh and of every strategy.

    Raises:
        ValueError: a parameter outside of embed, layers and head, or a size that cannot split the
            model.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    frozen = frozenset(n for n, each in model.named_parameters() if not each.requires_grad)
    split = {}
    for size in {*sizes} - {1}:
        plan = model.tensor_parallel_plan(size)
        placed = {name: placement_of(name, plan) for name in shapes}
        split[size] = {n: each.dim for n, each in placed.items() if isinstance(each, Shard)}
    return Weights(shapes, split, frozenset(model.tied.values()), frozen)


def travel_groups(
    rank: int,
    ranks: int,
    per_node: int,
    timeout: timedelta | None,
    device: torch.device | str = "cpu",
) -> Groups:
    """The process groups of all exchanges of a rank's links, made at the first call; collective.

    Args:
        rank: this rank.
        ranks: their number.
        per_node: those of a node.
        timeout: how long an exchange may take from now on; None: torch's default, or what it was.
        device: of this rank.
    """
    device = torch.device(device)

    def make() -> Groups:
        return _made_groups(rank, ranks, per_node, timeout, device)

    return kept(("travel", ranks, per_node, device.type), make, timeout)


def _made_groups(
    rank: int, ranks: int, per_node: int, timeout: timedelta | None, device: torch.device
) -> Groups:
    sets = [[range(ranks)]]
    two_hops = 1 < per_node < ranks
    if two_hops:
        rails = [range(place, ranks, per_node) for place in range(per_node)]
        sets = [rails, [range(first, first + per_node) for first in range(0, ranks, per_node)]]
    made: dict[range, dist.ProcessGroup] = {}
    for each in sets:
        group = own_group(each, rank, timeout)
        assert group is not None, "every rank is in one of the sets"
        made |= {own: group for own in each if rank in own}
    for group in made.values():
        connect_all(group, device)
    if not two_hops:
        return Groups(made)
    by_gloo = any(is_cuda_over_gloo(device, group) for group in made.values())
    waits_on_device = device.type == "cuda" and not by_gloo
    return Groups(made, Relay(device if waits_on_device else None))


class Pull:
    """One step's parameters, from where they rest to this rank; collective over all ranks.

    Args:
        link: of this rank.
        groups: for the ranks of each of its exchanges.
        rest: this rank's shard of each parameter that it has one of, by name in the whole model.
        dtype: of the parameters in the step.
        device: of this rank.
    """

    def __init__(
        self,
        link: Link,
        groups: Groups,
        rest: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._link, self._dtype, self._device = link, dtype, device
        self._values = Held(link, link.units, rest=False)
        source = Held(link, range(len(link.weights.units)), rest=True, given=rest)
        groups.settle()
        posts = [
            Post(link.exchange(slot, 0), groups.made, source, dtype, device)
            for slot in range(link.slots)
        ]
        if groups.relay is None:
            self._posts = list(map(done, posts))
            return
        middle = Middle(dtype, device, zeros=False)

        def hand_out(slot: int, post: Post) -> Post:
            post.arrive(middle)
            return Post(link.exchange(slot, 1), groups.made, middle, dtype, device)

        self._posts = [
            groups.relay.submit(partial(hand_out, slot, post)) for slot, post in enumerate(posts)
        ]

    def arrive(self, slot: int) -> dict[str, Tensor]:
        """Wait for a slot of this rank; its parameters by name in the whole model."""
        post, unit = self._posts[slot].result(), self._link.units[slot]
        self._values.make(unit, self._dtype, self._device, zeros=False)
        post.arrive(self._values)
        return self._values.of_unit(unit)

    def finish(self) -> None:
        """Wait for the slots in which this rank only sends."""
        for post in self._posts[len(self._link.units) :]:
            post.result().arrive(self._values)


class Push:
    """One step's gradients, from this rank to where parameters rest; collective over all ranks.

    Args:
        link: of this rank.
        groups: for the ranks of each of its exchanges.
        sums: the gradients of this rank's own micro-batches, by name in the whole model, complete
            when their slot is posted.
        dtype: of the sums.
        device: of this rank.
    """

    def __init__(
        self,
        link: Link,
        groups: Groups,
        sums: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._link, self._groups, self._dtype, self._device = link, groups, dtype, device
        self._sums = Held(link, link.units, rest=False, trained=True, given=sums)
        self._middle = Middle(dtype, device, zeros=True)
        self._posts: list[Future[Post]] = []
        groups.settle()

    @property
    def next(self) -> int:
        """The slot to be posted next; -1 when all have been."""
        return self._link.slots - 1 - len(self._posts)

    def post(self) -> None:
        """Send the gradients of the next slot, which are not held from then on."""
        slot, relay = self.next, self._groups.relay
        post = self._send(slot, self._link.hops - 1, self._sums)
        if slot < len(self._link.units):
            self._sums.drop(self._link.units[slot])
        self._posts.append(
            done(post) if relay is None else relay.submit(partial(self._hand_on, slot, post))
        )

    def finish(self) -> dict[str, Tensor]:
        """Wait for the sums of all ranks: of each trained shard that rests here, by name."""
        units = range(len(self._link.weights.units))
        totals = Held(self._link, units, rest=True, trained=True)
        for unit in units:
            totals.make(unit, self._dtype, self._device, zeros=True)
        for post in self._posts:
            post.result().arrive(totals, add=True)
        return {name: total for unit in units for name, total in totals.of_unit(unit).items()}

    def _hand_on(self, slot: int, post: Post) -> Post:
        post.arrive(self._middle, add=True)
        return self._send(slot, 0, self._middle)

    def _send(self, slot: int, hop: int, source: Views) -> Post:
        ranks, out, into = self._link.exchange(slot, hop, push=True)
        back = Exchange(ranks, out=into, into=out)
        return Post(back, self._groups.made, source, self._dtype, self._device)
