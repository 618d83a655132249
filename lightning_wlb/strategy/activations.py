"""Counts the activations that a rank holds: bytes of what forwards leave until their backwards.

Every storage that comes into being inside a forward action is noted, by a dispatch mode, with a
weak reference that neither copies nor keeps it. After each action those still alive are summed:
what autograd saved, boundaries of stages, messages on their way, cached keys and values. That
includes what a saved-tensor hook would not see: tensors that a custom function keeps by itself,
and what is saved under another hook (sliced attention and checkpointing have their own).

Backward actions add what they leave for other micro-batches, which their caller names. What lives
only inside an action is left out, and so are parameters, their gradients, and the step's inputs.

Cost: some 30 µs for each torch operation of a forward. Not while actions are timed.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
