"""One all-to-all of parameters or gradients on its way: its groups, buffers, and second hop.

The pieces of a :class:`RunningExchange` come from and go to a rank's boxes of parameters
(:class:`BoxTensors`), or to the buffers between two hops (:class:`ForwardedTensors`). The second
hop waits for the first beside the step: a :class:`Forwarder` posts it.

Cost: each piece is copied once where it is sent and once where it arrives, with a call for each;
both buffers are freed when the exchange has arrived. Not run on CUDA.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.distributed.device_mesh import is_cuda_over_gloo, set_timeout
from lightning_wlb.distributed.process_groups import connect_all, kept, own_group
from lightning_wlb.heterogeneous.planning.exchanges import Pieces, Redistribution, TurnExchange
from lightning_wlb.supervision.progress import PROGRESS

_T = TypeVar("_T")
_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Forwarder:
    """Makes calls that wait for one exchange and post the next, in the order they are given.

    Under gloo a wait stops the thread that waits, so a thread of its own makes these calls. Under
    NCCL a wait only lets a stream of the device wait, so they are made at once, on a stream of
    their own.

    An exception of a call is raised where its result is asked for, and no later call is made. The
    watchdog is told too (:mod:`~lightning_wlb.supervision.progress`), since the step's thread may
    wait for a rank that itself waits for what would have been sent; the watchdog lets all ranks
    end.

    ``device`` is the one whose stream waits for exchanges; None: a thread waits.
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
                target=_work, args=(self._jobs,), name="wlb-forwarder", daemon=True
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


def _work(jobs: _Jobs) -> None:
    """Make calls until the forwarder is gone."""
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


@dataclass(frozen=True, eq=False)
class ExchangeGroups:
    """The process groups of a rank's exchanges, over which nothing else is sent.

    Args:
        made: global ranks, among them this one -> their process group.
        forwarder: makes the second hop; None: there is one hop.
    """

    made: Mapping[range, dist.ProcessGroup]
    forwarder: Forwarder | None = None

    def after(self, job: Callable[[], _T]) -> Callable[[], _T]:
        """Make a call, beside the step if there are two hops; return what waits for its result."""
        if self.forwarder is not None:
            return self.forwarder.submit(job).result
        made = job()
        return lambda: made

    def settle(self) -> None:
        """Wait until the forwarder posts nothing, so that this thread may."""
        if self.forwarder is not None:
            self.forwarder.settle()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of all groups."""
        set_timeout(timeout, *self.made.values())


def exchange_groups(
    rank: int,
    ranks: int,
    per_node: int,
    timeout: timedelta | None,
    device: torch.device | str = "cpu",
) -> ExchangeGroups:
    """The process groups of all exchanges of a rank, made at the first call; collective.

    ``per_node`` is the number of ranks of a node; ``timeout`` None means torch's default, or the
    one that was set before.
    """
    device = torch.device(device)

    def make() -> ExchangeGroups:
        sets = [[range(ranks)]]
        if two_hops := 1 < per_node < ranks:
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
            return ExchangeGroups(made)
        by_gloo = any(is_cuda_over_gloo(device, group) for group in made.values())
        waits_on_device = device.type == "cuda" and not by_gloo
        return ExchangeGroups(made, Forwarder(device if waits_on_device else None))

    return kept(("exchanges", ranks, per_node, device.type), make, timeout)


class BoxTensors:
    """A rank's tensors of some buckets: its box of each parameter.

    Args:
        shard: whether the boxes are those of the shards between steps; else those in the step.
        trained: whether parameters without gradients are left out.
        given: the tensors by name in the whole model; None: :meth:`make` makes them.

    Raises:
        ValueError: a tensor of another shape than its box.
    """

    def __init__(
        self,
        redistribution: Redistribution,
        buckets: Sequence[int],
        *,
        shard: bool,
        trained: bool = False,
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._weights = redistribution.weights
        self._boxes = {
            (bucket, parameter): box
            for bucket in buckets
            for parameter, box in redistribution.boxes(bucket, shard=shard, trained=trained).items()
        }
        self._begins = {key: box[:, 0].tolist() for key, box in self._boxes.items()}
        self._tensors: dict[tuple[int, int], Tensor] = {}
        for key in self._boxes if given is not None else ():
            assert given is not None
            name, shape = self._name(*key), self._shape(*key)
            if given[name].shape != shape:
                raise ValueError(
                    f"{name}: rank {redistribution.rank} has a tensor of shape"
                    f" {tuple(given[name].shape)} where its box has {shape}. Was the redistribution"
                    " made for this mesh and these pipelines?"
                )
            self._tensors[key] = given[name]

    def make(self, bucket: int, dtype: torch.dtype, device: torch.device, *, zeros: bool) -> None:
        """New tensors of a bucket in place of given ones, of zeros or to be overwritten."""
        new = torch.zeros if zeros else torch.empty
        for key in self._boxes:
            if key[0] == bucket:
                self._tensors[key] = new(self._shape(*key), dtype=dtype, device=device)

    def drop(self, bucket: int) -> None:
        """Let go of the tensors of a bucket."""
        for key in [key for key in self._tensors if key[0] == bucket]:
            del self._tensors[key]

    def of_bucket(self, number: int) -> dict[str, Tensor]:
        """The tensors of a bucket, by name in the whole model."""
        return {self._name(*k): tensor for k, tensor in self._tensors.items() if k[0] == number}

    def views(self, pieces: Pieces) -> list[Tensor]:
        """The elements of each piece."""
        found = []
        for bucket, parameter, box in _rows(pieces):
            tensor, begins = self._tensors[bucket, parameter], self._begins[bucket, parameter]
            ends = zip(box[: tensor.ndim], begins, strict=False)
            found.append(tensor[tuple(slice(start - at, stop - at) for (start, stop), at in ends)])
        return found

    def _name(self, bucket: int, parameter: int) -> str:
        return self._weights.buckets[bucket].names[parameter]

    def _shape(self, bucket: int, parameter: int) -> tuple[int, ...]:
        dims = len(self._weights.shapes[self._name(bucket, parameter)])
        box = self._boxes[bucket, parameter]
        return tuple((box[:dims, 1] - box[:dims, 0]).tolist())


class ForwardedTensors:
    """Buffers of a rank that forwards pieces between two hops; made where they are first asked for.

    ``zeros``: whether pieces begin as zeros; else they are to be overwritten.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, zeros: bool) -> None:
        self._new = torch.zeros if zeros else torch.empty
        self._dtype, self._device = dtype, device
        self._pieces: dict[tuple[int, ...], Tensor] = {}

    def views(self, pieces: Pieces) -> list[Tensor]:
        """The elements of each piece, flat."""
        found = []
        counts = pieces.elements.tolist()
        for (bucket, parameter, box), count in zip(_rows(pieces), counts, strict=True):
            key = bucket, parameter, *(start for start, _ in box)
            if key not in self._pieces:
                self._pieces[key] = self._new(count, dtype=self._dtype, device=self._device)
            found.append(self._pieces[key])
        return found


PieceTensors = BoxTensors | ForwardedTensors
"""Tensors whose elements an exchange carries."""


def _rows(pieces: Pieces) -> list[tuple[int, int, list[list[int]]]]:
    """Bucket, parameter and box of each piece, as Python numbers."""
    return list(zip(*(each.tolist() for each in pieces[1:]), strict=True))


class RunningExchange:
    """One all-to-all on its way, of the elements of ``source``; collective over its ranks."""

    def __init__(
        self,
        exchange: TurnExchange,
        groups: ExchangeGroups,
        source: PieceTensors,
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
            group=groups.made[ranks],
            async_op=True,
        )

    def arrive(self, target: PieceTensors, *, add: bool = False) -> None:
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


def _counts(pieces: Pieces, ranks: range) -> list[int]:
    """Elements to or from each rank of an exchange."""
    places = (pieces.peer - ranks.start) // ranks.step
    counts: list[int] = np.bincount(places, pieces.elements, len(ranks)).astype(np.int64).tolist()
    return counts
