"""The hooks by which a step's parameters enter a model's modules and their gradients leave them.

Between steps a module holds sharded parameters. In a step they are gathered, and a forward hook
lets each module wait for its own before it runs. A backward leaves every gradient in the sums of
the step, in the dtype of reduction, so that ``.grad`` of a gathered parameter stays None. Which
ranks the parameters come from is not known here: :mod:`.parameter_buckets` says it for the mesh,
``heterogeneous/parameters.py`` for pipelines that differ.
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
    """Brings a step its parameters and takes its gradients away."""

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
    """Call ``wait`` before each forward of a module, and give it bfloat16 where ``dtype`` is that.

    It comes before the module's own hooks, which may read its parameters.
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
    """What to raise before the last backward if no forward has waited for some parameters."""
    return ValueError(
        f"A stage ran without calling a module that it holds ({', '.join(names)}), so parameters"
        " were not waited for and would not be trained. Call embed, head and every layer in the"
        " model's forward, as modules: self.layers[number](hidden, ...)."
    )


def gradient_too_late(name: str) -> RuntimeError:
    """What to raise where a module runs, or gets a gradient, behind its last one of the step."""
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
