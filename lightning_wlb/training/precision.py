"""Precision without autocast: the dtypes of sharded parameters, of a step, and of its sums.

==============  ================  ============  ==========  =========
precision       parameters        compute       gradients   reduction
==============  ================  ============  ==========  =========
``32-true``     float32           float32       float32     float32
``64-true``     float64           float64       float64     float64
``bf16-true``   bfloat16          bfloat16      float32     float32
``bf16-mixed``  float32           bfloat16      float32     float32
==============  ================  ============  ==========  =========

``bf16-true`` draws initial values in float32 and rounds those that a rank keeps. fp16 needs loss
scaling, which a plan of many backwards in one step does not have. On CPU Lightning itself turns
``16-mixed`` into ``bf16-mixed``, and says so, before a strategy sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_wlb.training.clipping_and_nonfinite import StepGuard

_DTYPES = {
    # name: (initialise, sharded parameters, compute)
    "32-true": (torch.float32, torch.float32, torch.float32),
    "64-true": (torch.float64, torch.float64, torch.float64),
    "bf16-true": (torch.float32, torch.bfloat16, torch.bfloat16),
    "bf16-mixed": (torch.float32, torch.float32, torch.bfloat16),
}


def name_of(dtype: torch.dtype) -> str:
    """The name that the cost model gives a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


class WLBPrecision(Precision):
    """Lightning's precision plugin for :class:`.WLBStrategy`, which makes it from ``precision``.

    Raises:
        MisconfigurationException: for a precision outside the table above.
    """

    guard: StepGuard  # the strategy sets it

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in _DTYPES:
            raise MisconfigurationException(
                f"WLBStrategy cannot train with precision={precision!r}: it needs loss scaling or"
                " a plugin that a step of many backward passes does not support. Use one of"
                f" {', '.join(_DTYPES)}; on GPUs 'bf16-mixed' is the usual choice."
            )
        self.precision = precision  # type: ignore[assignment]  # checked above
        self.initial_dtype, self.parameter_dtype, self.compute_dtype = _DTYPES[precision]

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients accumulate and are reduced."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    def tensor_init_context(self) -> _DtypeContextManager:
        """Make new tensors, and a module's parameters, in the dtype of initialisation."""
        return _DtypeContextManager(self.initial_dtype)

    module_init_context = tensor_init_context

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the step's closure, and then the optimizer if the guard accepts the gradients."""
        result = self._wrap_closure(model, optimizer, closure)
        if self.guard.accepts(self._parameters(optimizer)):
            optimizer.step(closure=lambda: result, **kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale all gradients so that their norm over all ranks is at most ``clip_val``."""
        self.guard.clip_by_norm(self._parameters(optimizer), float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Bound every gradient to ``[-clip_val, clip_val]``."""
        self.guard.clip_by_value(self._parameters(optimizer), float(clip_val))

    def _parameters(self, optimizer: Optimizer) -> list[torch.nn.Parameter]:
        return list(self.main_params(optimizer))
