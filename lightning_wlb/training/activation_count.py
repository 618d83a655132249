"""The bytes of activations that a step holds, from its forwards until their backwards.

Cost: every torch operation of a forward becomes slower, so not in steps whose times matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ActivationCount(TorchDispatchMode):
    """The activations of one step at a time.

    Use it as a context manager around each forward, and call :meth:`sample` after each action.

    Every storage that comes into being inside the context is noted with a weak reference, which
    neither copies nor keeps it, and :meth:`sample` sums those still alive: what autograd saved,
    boundaries of stages, messages on their way, cached keys and values, but no parameters, their
    gradients or inputs of the step. A dispatch mode also sees what a saved-tensor hook would not:
    what custom functions keep by themselves or is saved under another hook (sliced attention's).

    Attributes:
        held_bytes: what is held after each action of the last step, in order, and once more at
            its end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.held_bytes: list[int] = []

    def begin_step(self) -> None:
        """Forget the last step."""
        self._alive = {}
        self.held_bytes = []

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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the outputs of an operation that are no views of its inputs."""
        result = func(*args, **(kwargs or {}))
        given = {_key(each) for each in _tensors((args, kwargs))}
        self.add(each for each in _tensors(result) if _key(each) not in given)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
