"""Parameters on their way to the pipelines of a step, and gradients on their way back.

Where a step's pipelines differ from the mesh's, a :class:`.Link` says what every rank sends to
every other; here it is sent. Each slot of the link is one uneven all-to-all over all ranks, or,
over several nodes, one over the rail and one in the node. A rank that lacks nothing joins it with
nothing to receive, so that all ranks post the same collectives in the same order whatever their
stages are.

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

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from lightning_wlb.distributed.device_mesh import is_cuda_over_gloo, set_timeout
from lightning_wlb.distributed.process_groups import connect_all, kept, own_group
from lightning_wlb.heterogeneous.planning.exchanges import Exchange, Link, Parts
from lightning_wlb.heterogeneous.planning.sharded_layouts import Weights
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.tensor_parallel import placement_of
from lightning_wlb.supervision.progress import PROGRESS


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


_T = TypeVar("_T")
_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Relay:
    """Makes calls in the order in which they are given.

    Args:
        device: whose streams wait for exchanges, so that no thread has to; None: a thread waits.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._stream = None if device is None else torch.cuda.Stream(device)
        self._last: Future[Any] | None = None
        if self._stream is None:
            self._jobs: _Jobs = SimpleQueue()
            weakref.finalize(self, self._jobs.put, None)
            # A daemon, since a process must be able to end while its thread waits. The executors of
            # concurrent.futures are waited for.
            threading.Thread(
                target=_work, args=(self._jobs,), name="wlb-relay", daemon=True
            ).start()

    def submit(self, job: Callable[[], _T]) -> Future[_T]:
        """Make a call, without gradients, once all earlier ones have been made."""
        future: Future[_T] = Future()
        if self._stream is None:
            self._jobs.put((future, job))
        else:
            with torch.cuda.stream(self._stream), torch.no_grad():
                future.set_result(job())
        self._last = future
        return future

    def settle(self) -> None:
        """Wait until all calls have been made, so that this thread may use their process groups."""
        if self._last is not None:
            self._last.result()


def done(value: _T) -> Future[_T]:
    """The result of a call that needed no relay."""
    future: Future[_T] = Future()
    future.set_result(value)
    return future


def _work(jobs: _Jobs) -> None:
    """Make calls until the relay is gone."""
    failed: BaseException | None = None
    while (given := jobs.get()) is not None:
        future, job = given
        try:
            if failed is not None:
                raise failed
            with torch.no_grad():
                future.set_result(job())
        except BaseException as error:
            if failed is None:
                PROGRESS.failed = f"{type(error).__name__}: {error}"
            failed = error
            future.set_exception(error)
        del given, future, job  # or what they hold would live until the next call


class Views(Protocol):
    """Tensors of one rank."""

    def views(self, parts: Parts) -> list[Tensor]:
        """The elements of each part."""


class Held:
    """A rank's box of each parameter of some units.

    Args:
        link: of the rank.
        units: numbers of the units.
        rest: the boxes at rest; else those in the step.
        trained: whether only of parameters that get gradients.
        given: the tensors by name in the whole model; None until :meth:`make`.

    Raises:
        ValueError: a tensor of another shape than its box.
    """

    def __init__(
        self,
        link: Link,
        units: Sequence[int],
        *,
        rest: bool,
        trained: bool = False,
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._weights = link.weights
        self._boxes = {
            (unit, parameter): box
            for unit in units
            for parameter, box in link.boxes(unit, rest=rest, trained=trained).items()
        }
        self._begins = {key: box[:, 0].tolist() for key, box in self._boxes.items()}
        self._tensors: dict[tuple[int, int], Tensor] = {}
        for key in self._boxes if given is not None else ():
            assert given is not None
            name, shape = self._name(*key), self._shape(*key)
            if given[name].shape != shape:
                raise ValueError(
                    f"{name}: rank {link.rank} has a tensor of shape {tuple(given[name].shape)}"
                    f" where the link has {shape}. Was the link made for this mesh and strategy?"
                )
            self._tensors[key] = given[name]

    def make(self, unit: int, dtype: torch.dtype, device: torch.device, *, zeros: bool) -> None:
        """New tensors of a unit in place of given ones, of zeros or to be overwritten."""
        new = torch.zeros if zeros else torch.empty
        for key in self._boxes:
            if key[0] == unit:
                self._tensors[key] = new(self._shape(*key), dtype=dtype, device=device)

    def drop(self, unit: int) -> None:
        """Let go of the tensors of a unit."""
        for key in [key for key in self._tensors if key[0] == unit]:
            del self._tensors[key]

    def of_unit(self, number: int) -> dict[str, Tensor]:
        """The tensors of a unit, by name in the whole model."""
        return {self._name(*k): tensor for k, tensor in self._tensors.items() if k[0] == number}

    def views(self, parts: Parts) -> list[Tensor]:
        """The elements of each part."""
        found = []
        for unit, parameter, box in _rows(parts):
            tensor, begins = self._tensors[unit, parameter], self._begins[unit, parameter]
            ends = zip(box[: tensor.ndim], begins, strict=False)
            found.append(tensor[tuple(slice(start - at, stop - at) for (start, stop), at in ends)])
        return found

    def _name(self, unit: int, parameter: int) -> str:
        return self._weights.units[unit].names[parameter]

    def _shape(self, unit: int, parameter: int) -> tuple[int, ...]:
        dims = len(self._weights.shapes[self._name(unit, parameter)])
        box = self._boxes[unit, parameter]
        return tuple((box[:dims, 1] - box[:dims, 0]).tolist())


class Middle:
    """What a rank hands on between two hops: whole pieces, made where they are first asked for.

    Args:
        dtype: of the elements.
        device: of this rank.
        zeros: whether pieces begin as zeros; else they are to be overwritten.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, zeros: bool) -> None:
        self._new = torch.zeros if zeros else torch.empty
        self._dtype, self._device = dtype, device
        self._pieces: dict[tuple[int, ...], Tensor] = {}

    def views(self, parts: Parts) -> list[Tensor]:
        """The elements of each part, flat."""
        found = []
        for (unit, parameter, box), count in zip(
            _rows(parts), parts.elements.tolist(), strict=True
        ):
            key = unit, parameter, *(start for start, _ in box)
            if key not in self._pieces:
                self._pieces[key] = self._new(count, dtype=self._dtype, device=self._device)
            found.append(self._pieces[key])
        return found


class Post:
    """One all-to-all on its way, of the elements of ``source``; collective over its ranks."""

    def __init__(
        self,
        exchange: Exchange,
        groups: Mapping[range, dist.ProcessGroup],
        source: Views,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        ranks, out, self._into = exchange
        sizes = [out.elements, self._into.elements]
        self._sent, self._got = (
            torch.empty(int(each.sum()), dtype=dtype, device=device) for each in sizes
        )
        places = self._sent.split(sizes[0].tolist())
        for view, place in zip(source.views(out), places, strict=True):
            place.view(view.shape).copy_(view)
        self._work = dist.all_to_all_single(
            self._got,
            self._sent,
            _counts(self._into, ranks),
            _counts(out, ranks),
            group=groups[ranks],
            async_op=True,
        )

    def arrive(self, target: Views, *, add: bool = False) -> None:
        """Wait, and copy into the target or add to it; once."""
        self._work.wait()
        if self._got.is_cuda:
            # They may have been allocated on another stream, which has not waited.
            for each in (self._sent, self._got):
                each.record_stream(torch.cuda.current_stream(each.device))
        parts = self._got.split(self._into.elements.tolist())
        for view, part in zip(target.views(self._into), parts, strict=True):
            if add:
                view.add_(part.view(view.shape))
            else:
                view.copy_(part.view(view.shape))
        del self._work, self._sent, self._got


def _counts(parts: Parts, ranks: range) -> list[int]:
    """Elements to or from each rank of an exchange."""
    places = (parts.peer - ranks.start) // ranks.step
    counts = np.zeros(len(ranks), np.int64)
    np.add.at(counts, places, parts.elements)
    result: list[int] = counts.tolist()
    return result


def _rows(parts: Parts) -> list[tuple[int, int, list[list[int]]]]:
    """Unit, parameter and box of each part, as Python numbers."""
    return list(zip(parts.unit.tolist(), parts.parameter.tolist(), parts.box.tolist(), strict=True))


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
