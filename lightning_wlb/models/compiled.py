"""Pure functions of rows, compiled by inductor; run as they are where that fails.

A function is compiled once for any number of rows: that dim is marked dynamic, all others are taken
as they are. It must compile as one graph, so that nothing falls back unseen. Its parameters are
arguments, so that a step may bring other tensors of the same shapes, as gathered ones are.

Eagerly run in any case: fewer than two rows, which inductor would compile again for; a dispatch
mode that looks at every operation; ``torch.compiler.set_stance("force_eager")``.

Cost: seconds of compiler time for each function, at its first call with gradients and again at its
first without; some tens of microseconds of checks for each call. Not for functions that communicate
or call a kernel of their own, which inductor has nothing to fuse with.

Run on CPUs only so far; on CUDA inductor writes Triton kernels, and their timing may choose another
order of sums in another process, so that only a run with ``TORCHINDUCTOR_DETERMINISTIC=1`` can be
repeated bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Function = Callable[..., Tensor]


class Compiler:
    """Compiles the functions of one model, until one of them cannot be compiled.

    Attributes:
        failure: why functions run as they are; None as long as they are compiled.
    """

    def __init__(self) -> None:
        self.failure: str | None = None

    def fail(self, error: Exception) -> None:
        """Compile nothing from here on, and say so once."""
        # The rest of such a message is about stack traces and how to report a bug.
        cause = str(error).strip().split("\n\n")[0]
        self.failure = f"{type(error).__name__}: {cause}"
        warnings.warn(
            "compile=True: torch.compile fails here, so this process runs the model's blocks"
            f" uncompiled, which is slower and as exact. The cause is {self.failure}\nIf a C++"
            " compiler is missing, install one (g++, or set CXX); if the limit of recompilations"
            " was reached by other models of this process, call torch.compiler.reset() between"
            " them; else set compile=False.",
            stacklevel=2,
        )


class Compiled:
    """A function, compiled at its first call.

    Args:
        compiler: of the model.
        function: pure; it returns a tensor.
        rows: number of its first arguments that are tensors whose first dim varies.
        eager: what equals it and is faster uncompiled; None: nothing.
    """

    def __init__(
        self, compiler: Compiler, function: Function, rows: int = 1, eager: Function | None = None
    ) -> None:
        self._compiler, self._function, self._rows = compiler, function, rows
        self._eager = function if eager is None else eager
        self._compiled: Function | None = None

    def __call__(self, *args: Any) -> Tensor:
        """The function's value."""
        if (
            self._compiler.failure is not None
            or len(args[0]) < 2
            or is_in_torch_dispatch_mode(include_infra_modes=False)
        ):
            return self._eager(*args)
        try:
            return self._run(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            # Raised before anything of the function has run.
            self._compiler.fail(error)
            return self._eager(*args)

    def _run(self, *args: Any) -> Tensor:
        for each in args[: self._rows]:
            torch._dynamo.mark_dynamic(each, 0)
        if self._compiled is not None:
            return self._compiled(*args)
        # Else what backward needs is compiled there, where there is no way back.
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            compiled = torch.compile(self._function, fullgraph=True, dynamic=False)
            result = compiled(*args)
        self._compiled = compiled
        return result
