"""Parameters on their way to the pipelines of a step, and gradients on their way back.

Where a step's pipelines differ from the mesh's, a :class:`~lightning_wlb.links.link.Link` says what
every rank sends to every other; here it is sent. Each slot of the link is one uneven all-to-all
over all ranks, or, over several nodes, one over the rail and one in the node. A rank that lacks
nothing joins it with nothing to receive, so that all ranks post the same collectives in the same
order whatever their stages are.

A :class:`Pull` posts all of a step's parameters at once. Over two hops it waits for what comes over
the rails before it returns: pipeline ranks that wait for each other's activations could not wait
for each other's part of the second hop too. A :class:`Push` posts slots from the last to the first,
each when its gradients are complete, and waits for none before :meth:`.Push.finish`. A sum is
made in the order of ranks: a step gives the same bits again, and copies of a parameter at rest get
the same bits.

Cost: beside what the link counts, each piece is copied once where it is sent and once where it
arrives, with a call for each piece; what is sent is held until it is waited for. Not run on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from lightning_wlb.links.layout import Weights
from lightning_wlb.links.link import Exchange, Link, Parts
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.tensor_parallel import placement_of
from lightning_wlb.strategy.process_groups import own_group

Groups = Callable[[range], dist.ProcessGroup]
"""Global ranks, among them this one -> their process group, which carries this traffic alone."""


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
    split = {}
    for size in {*sizes} - {1}:
        plan = model.tensor_parallel_plan(size)
        placed = {name: placement_of(name, plan) for name in shapes}
        split[size] = {n: each.dim for n, each in placed.items() if isinstance(each, Shard)}
    return Weights(shapes, split, frozenset(model.tied.values()))


def travel_groups(rank: int, ranks: int, per_node: int, timeout: timedelta | None) -> Groups:
    """The process groups of all exchanges of a rank's links; collective over all ranks.

    Args:
        rank: this rank.
        ranks: their number.
        per_node: those of a node.
        timeout: how long an exchange may take; None: torch's default.
    """
    sets = [[range(ranks)]]
    if 1 < per_node < ranks:
        rails = [range(place, ranks, per_node) for place in range(per_node)]
        sets = [rails, [range(first, first + per_node) for first in range(0, ranks, per_node)]]
    made: dict[range, dist.ProcessGroup] = {}
    for each in sets:
        group = own_group(each, rank, timeout)
        assert group is not None, "every rank is in one of the sets"
        made |= {own: group for own in each if rank in own}
    return made.__getitem__


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
        self._link = link
        self._values = _Held(link, link.units, rest=False)
        self._values.make(dtype, device)
        source: _Views = _Held(link, range(len(link.weights.units)), rest=True, given=rest)
        slots = range(link.slots)
        self._posts = [_Post(link.exchange(n, 0), groups, source, dtype, device) for n in slots]
        if link.hops == 2:
            source = _Middle(dtype, device)
            for slot in slots:
                self._posts[slot].arrive(source)
                exchange = link.exchange(slot, 1)
                self._posts[slot] = _Post(exchange, groups, source, dtype, device)

    def arrive(self, slot: int) -> dict[str, Tensor]:
        """Wait for a slot of this rank; its parameters by name in the whole model."""
        self._posts[slot].arrive(self._values)
        return self._values.of_unit(self._link.units[slot])

    def finish(self) -> None:
        """Wait for the slots in which this rank only sends."""
        for post in self._posts[len(self._link.units) :]:
            post.arrive(self._values)


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
        self._sums = _Held(link, link.units, rest=False, given=sums)
        self._posts: list[_Post] = []

    @property
    def next(self) -> int:
        """The slot to be posted next; -1 when all have been."""
        return self._link.slots - 1 - len(self._posts)

    def post(self) -> None:
        """Send the gradients of the next slot."""
        self._posts.append(self._send(self.next, self._link.hops - 1, self._sums))

    def finish(self) -> dict[str, Tensor]:
        """Wait for the sums of all ranks: of each shard that rests here, by name."""
        units = range(len(self._link.weights.units))
        totals = _Held(self._link, units, rest=True)
        totals.make(self._dtype, self._device)
        if self._link.hops == 2:
            middle = _Middle(self._dtype, self._device)
            for number, post in enumerate(self._posts):
                post.arrive(middle, add=True)
                self._posts[number] = self._send(self._link.slots - 1 - number, 0, middle)
        for post in self._posts:
            post.arrive(totals, add=True)
        return {name: total for unit in units for name, total in totals.of_unit(unit).items()}

    def _send(self, slot: int, hop: int, source: _Views) -> _Post:
        ranks, out, into = self._link.exchange(slot, hop, push=True)
        back = Exchange(ranks, out=into, into=out)
        return _Post(back, self._groups, source, self._dtype, self._device)


class _Views(Protocol):
    """Tensors of one rank."""

    def views(self, parts: Parts) -> list[Tensor]:
        """The elements of each part."""


class _Held:
    """A rank's box of each parameter of some units.

    Args:
        link: of the rank.
        units: numbers of the units.
        rest: the boxes at rest; else those in the step.
        given: the tensors by name in the whole model; None until :meth:`make`.
    """

    def __init__(
        self,
        link: Link,
        units: Sequence[int],
        *,
        rest: bool,
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._weights = link.weights
        self._boxes = {
            (unit, parameter): box
            for unit in units
            for parameter, box in link.boxes(unit, rest=rest).items()
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

    def make(self, dtype: torch.dtype, device: torch.device) -> None:
        """Zeros in place of given tensors."""
        for key in self._boxes:
            self._tensors[key] = torch.zeros(self._shape(*key), dtype=dtype, device=device)

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


class _Middle:
    """What a rank hands on between two hops: whole pieces, zeros where they are first asked for."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
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
                self._pieces[key] = torch.zeros(count, dtype=self._dtype, device=self._device)
            found.append(self._pieces[key])
        return found


class _Post:
    """One all-to-all on its way, of the elements of ``source``; collective over its ranks."""

    def __init__(
        self,
        exchange: Exchange,
        groups: Groups,
        source: _Views,
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
            group=groups(ranks),
            async_op=True,
        )

    def arrive(self, target: _Views, *, add: bool = False) -> None:
        """Wait, and copy into the target or add to it."""
        self._work.wait()
        parts = self._got.split(self._into.elements.tolist())
        for view, part in zip(target.views(self._into), parts, strict=True):
            if add:
                view.add_(part.view(view.shape))
            else:
                view.copy_(part.view(view.shape))


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
