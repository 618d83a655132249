"""What a step is measured by: the time of each action, and the activations that it holds.

* :class:`Stopwatch`: each action where it runs, on the CPU by the rank's own clock, on CUDA by
  events. On a CPU with one thread, ``compute`` is the thread's own CPU time. It leaves out the
  waits inside collectives, and it stays right when several ranks share a core, where wall time
  measures the neighbours. On CUDA, events are recorded on the stream and read once at the end of
  the step.
* :class:`ActivationCount`: bytes of what forwards leave until their backwards. Every storage that
  comes into being inside a forward action is noted, by a dispatch mode, with a weak reference that
  neither copies nor keeps it. After each action those still alive are summed: what autograd saved,
  boundaries of stages, messages on their way, cached keys and values. That includes what a
  saved-tensor hook would not see: tensors that a custom function keeps by itself, and what is saved
  under another hook (sliced attention and checkpointing have their own). Backward actions add what
  they leave for other micro-batches, which their caller names. What lives only inside an action is
  left out, and so are parameters, their gradients, and the step's inputs.

Cost: two clock readings for each action; counting some 30 µs for each torch operation of a forward,
so not in steps whose times matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.timeline import Timing


class Stopwatch(Protocol):
    """Collects one step's timings. ``start``/``stop`` bracket attention kernels."""

    def begin_step(self) -> None:
        """Forget the last step; time zero is now."""

    def action(self, action: Action) -> AbstractContextManager[None]:
        """Context manager around one action's computation."""

    def start(self) -> None:
        """An attention kernel starts."""

    def stop(self) -> None:
        """The attention kernel that started last is done."""

    def timings(self) -> list[Timing]:
        """The step's actions in the order in which they ran."""


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    return CUDAStopwatch() if device.type == "cuda" else CPUStopwatch()


class CPUStopwatch:
    """Reads clocks at once. Backward runs in the calling thread on CPU, so its time counts."""

    def __init__(self) -> None:
        self._timings: list[Timing] = []
        self._origin = 0.0
        self._attention = 0.0
        self._attention_start = 0.0
        self._clock = time.perf_counter

    def begin_step(self) -> None:
        """Forget the last step; time zero is now."""
        self._timings = []
        self._origin = time.perf_counter()
        # A thread pool's work is not in the caller's CPU time.
        single = torch.get_num_threads() == 1
        self._clock = time.thread_time if single else time.perf_counter

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Time one action's computation."""
        self._attention = 0.0
        wall, own = time.perf_counter(), self._clock()
        yield
        self._timings.append(
            Timing(
                action=action,
                begin=wall - self._origin,
                wall=time.perf_counter() - wall,
                compute=self._clock() - own,
                attention=self._attention,
            )
        )

    def start(self) -> None:
        """An attention kernel starts."""
        self._attention_start = self._clock()

    def stop(self) -> None:
        """The attention kernel that started last is done."""
        self._attention += self._clock() - self._attention_start

    def timings(self) -> list[Timing]:
        """The step's actions in the order in which they ran."""
        return self._timings


class CUDAStopwatch:
    """Records CUDA events; :meth:`timings` waits for the device once."""

    def __init__(self) -> None:
        self._origin: torch.cuda.Event | None = None
        self._actions: list[tuple[Action, torch.cuda.Event, torch.cuda.Event, int, int]] = []
        self._kernels: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._open: torch.cuda.Event | None = None

    @staticmethod
    def _now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_step(self) -> None:
        """Forget the last step; time zero is now."""
        self._actions, self._kernels = [], []
        self._origin = self._now()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Time one action's computation."""
        begin, kernels = self._now(), len(self._kernels)
        yield
        self._actions.append((action, begin, self._now(), kernels, len(self._kernels)))

    def start(self) -> None:
        """An attention kernel starts."""
        self._open = self._now()

    def stop(self) -> None:
        """The attention kernel that started last is done."""
        assert self._open is not None
        self._kernels.append((self._open, self._now()))

    def timings(self) -> list[Timing]:
        """The step's actions in the order in which they ran."""
        torch.cuda.synchronize()
        assert self._origin is not None
        result = []
        for action, begin, end, first, last in self._actions:
            wall = begin.elapsed_time(end) / 1000  # elapsed_time is in milliseconds
            attention = sum(a.elapsed_time(b) for a, b in self._kernels[first:last]) / 1000
            start = self._origin.elapsed_time(begin) / 1000
            result.append(Timing(action, start, wall, wall, attention))
        return result


class ActivationCount:
    """The activations of one step at a time.

    Use it as a context manager around each forward, and call :meth:`sample` after each action.

    Attributes:
        peak_bytes: most that was held after an action of the last step.
        held_bytes: what is held after each action of the last step, in order, and once more at
            its end.
    """

    def __init__(self) -> None:
        self._mode = _New(self.add)
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.held_bytes: list[int] = []

    @property
    def peak_bytes(self) -> int:
        """Most that was held after an action of the last step."""
        return max(self.held_bytes, default=0)

    def begin_step(self) -> None:
        """Forget the last step."""
        self._alive = {}
        self.held_bytes = []

    def __enter__(self) -> None:
        """Note storages that come into being from here on."""
        self._mode.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Note no more."""
        self._mode.__exit__(kind, error, trace)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Note the storages of some tensors, each once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            # The weak reference keeps the key from being given to another storage.
            self._alive[reference.cdata] = reference, storage.nbytes()

    def sample(self) -> None:
        """Sum what is held now."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.held_bytes.append(sum(size for _, size in self._alive.values()))


class _New(TorchDispatchMode):
    """Reports the outputs of each operation that are no views of its inputs."""

    def __init__(self, report: Any) -> None:
        super().__init__()
        self._report = report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_key(each) for each in _tensors((args, kwargs))}
        self._report(each for each in _tensors(result) if _key(each) not in given)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _key(tensor: Tensor) -> int:
    storage: UntypedStorage = tensor.untyped_storage()
    return storage._cdata
