"""Exchanges on their way, and the tensors between which they carry elements.

A :class:`~lightning_wlb.heterogeneous.posts.Post` is one uneven all-to-all, whose pieces come from
and
go to :class:`.Views`: a rank's boxes of parameters (:class:`.Held`), or what it hands on between
two hops (:class:`.Middle`).

Cost: each piece is copied once where it is sent and once where it arrives, with a call for each;
both buffers are freed when the exchange has arrived. Not run on CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.heterogeneous.links import Exchange, Link, Parts


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
