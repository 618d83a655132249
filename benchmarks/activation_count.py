"""Counts the bytes of activations that a step holds, from its forwards until their backwards.

Cost: every torch operation of a forward becomes slower, and compiled blocks run uncompiled, so not
in steps whose times matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from itertools import chain
from typing import Any
from unittest import mock

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_wlb.data.batch import StepBatch
from lightning_wlb.models.compiled_functions import CompiledFunction
from lightning_wlb.schedule.actions import FORWARD, Action
from lightning_wlb.training import executor as training_executor
from lightning_wlb.training.executor import Executor, Step


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


def count_activations(executor: Executor) -> ActivationCount:
    """Count what each step of a rank holds, from the next one on."""
    count, run = ActivationCount(), executor.run

    class CountedStep(Step):
        def run(self, action: Action) -> None:
            if not count.held_bytes:
                for each in executor.bucket_lifetimes._in_step:  # parameters are no activations
                    each.wait()
            with count if action.kind == FORWARD else nullcontext():
                super().run(action)
            # What a backward leaves for other micro-batches and ranks: the gradients of earlier
            # slices' keys, and those that have been sent.
            sent = [tensor for _, tensor in self.messages._sends.values()]
            of_keys, of_states = self.cache.gradients, self.cache.states.gradients
            left = chain(*of_keys.values(), *of_states.values())
            count.add([*sent, *self.messages._local.values(), *left])
            count.sample()

    def counted(batch: StepBatch, denominator: int) -> Tensor:
        count.begin_step()
        # What is counted in forward must be what a recomputation in backward saves again: neither
        # runs compiled functions.
        with (
            mock.patch.object(CompiledFunction, "__call__", lambda self, *args: self._eager(*args)),
            mock.patch.object(training_executor, "Step", CountedStep),
        ):
            loss = run(batch, denominator)
        count.sample()
        return loss

    executor.run = counted  # type: ignore[method-assign]
    return count


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
