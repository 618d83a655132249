"""The hooks by which a step's parameters enter a model's modules and their gradients leave them.

Between steps a module holds shards. In a step they are gathered, and a forward hook lets each
module wait for its own before it runs. Every gradient moves to the step's sums as soon as it is
made, so that ``.grad`` of a gathered parameter stays None. The parameters come from
:mod:`.gather_and_reduce` on the mesh, from ``heterogeneous/parameters.py`` on other pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_wlb.schedule.actions import Action


class StepParameters(Protocol):
    """Gathers a step's parameters and reduces their gradients."""

    def step(
        self, program: Sequence[Action], shared: Collection[int] = ()
    ) -> AbstractContextManager[None]:
        """Run the actions of ``program`` inside, without backward where gradients are disabled.

        ``shared`` has the numbers of the micro-batches that other replicas share.
        """

    def action(self, action: Action) -> AbstractContextManager[None]:
        """Run one action of the step inside."""

    def wait(self) -> None:
        """Wait for all parameters."""

    def finish(self) -> None:
        """Wait for the gradients and set ``.grad`` of the sharded parameters."""


def before_forward(
    module: nn.Module, wait: Callable[[], None], dtype: torch.dtype
) -> RemovableHandle:
    """Call ``wait`` before each forward of a module, and cast its inputs if ``dtype`` is bfloat16.

    It runs before the module's own hooks, which may read its parameters.
    """

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        wait()
        if dtype == torch.bfloat16:
            return _cast_floats(args, dtype), _cast_floats(kwargs, dtype)
        return None

    return module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


def take_gradients(parameter: nn.Parameter, take: Callable[[Tensor], None]) -> None:
    """Give ``take`` each gradient of a parameter as soon as a backward has made it."""

    def hook(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        take(gradient)

    parameter.register_post_accumulate_grad_hook(hook)


def module_not_called(names: Iterable[str]) -> ValueError:
    """The error for a stage whose last backward begins before it has called one of its modules."""
    return ValueError(
        f"A stage ran without calling a module that it holds ({', '.join(names)}), so parameters"
        " were not waited for and would not be trained. Call embed, head and every layer in the"
        " model's forward, as modules: self.layers[number](hidden, ...)."
    )


def gradient_too_late(name: str) -> RuntimeError:
    """The error for a module that runs, or gets a gradient, after its last one of the step."""
    return RuntimeError(
        f"{name} runs, or gets a gradient, after its gradients of the step were complete."
        " A checkpoint of your model's own with use_reentrant=True does that: use False."
        " Between a step and its optimizer the model cannot be called."
    )


def _cast_floats(values: Any, dtype: torch.dtype) -> Any:
    if isinstance(values, Tensor):
        return values.to(dtype) if values.is_floating_point() else values
    if isinstance(values, dict):
        return {key: _cast_floats(value, dtype) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_cast_floats(value, dtype) for value in values)
    return values
