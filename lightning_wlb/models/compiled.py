"""Pure functions of rows, compiled by inductor; run as they are where that fails.

A function is compiled once for any number of rows: that dim is marked dynamic, all others are taken
as they are. It must compile as one graph, so that nothing falls back unseen. Its parameters are
arguments, so that a step may bring other tensors of the same shapes, as gathered ones are.

Run as they are in any case: on fewer than two rows, for which inductor would compile again; under a
dispatch mode, which looks at every operation; inside :func:`uncompiled`.

Cost: seconds of compiler time for each function, at its first call with gradients and again at its
first without; some tens of microseconds of checks for each call. Not for functions that communicate
or call a kernel of their own, which inductor has nothing to fuse with, nor for small layers on a
CPU, where the checks take longer than they save.

Run on CPUs only so far. On CUDA inductor chooses among Triton's kernels by time, so that sums may
have another order in another process, unless ``torch.use_deterministic_algorithms`` is on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch._functorch.config
import torch._inductor
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Function = Callable[..., Tensor]

_uncompiled = False  # of the process: on CUDA backward recomputes in a thread of autograd's


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run functions as they are, of all models of this process.

    For a forward under a dispatch mode and a backward without, which must recompute the same.
    """
    global _uncompiled
    before, _uncompiled = _uncompiled, True
    try:
        yield
    finally:
        _uncompiled = before


class Compiler:
    """What the compiled functions of one model share: whether a failure has been told.

    Attributes:
        failure: of the first function that could not be compiled; None so far.
    """

    def __init__(self) -> None:
        self.failure: str | None = None

    def tell(self, error: Exception) -> None:
        """Warn of the first failure; the others have the same cause as a rule."""
        if self.failure is not None:
            return
        # The rest of such a message is about stack traces and how to report a bug.
        first, *rest = str(error).strip().split("\n\n")
        said = (line for part in rest for line in part.splitlines() if "error:" in line)
        self.failure = " ".join([f"{type(error).__name__}: {first}", *islice(said, 1)])
        warnings.warn(
            "compile=True: torch.compile fails here, so this process runs blocks of the model"
            f" uncompiled, which is slower and as exact. The cause is {self.failure}\nIf a C++"
            " compiler is missing, install one (g++, or set CXX); if other models of this process"
            " have reached the limit of recompilations, call torch.compiler.reset() between them;"
            " else set compile=False.",
            stacklevel=2,
        )


class Compiled:
    """A function, compiled at its first call.

    One that fails is not tried again, and others are not given up for it: what a forward has run
    compiled, its recomputation in backward must run compiled too.

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
        self._ready: set[bool] = set()  # with gradients and without, once it has run so
        self._failed = False

    def __call__(self, *args: Any) -> Tensor:
        """The function's value."""
        if (
            _uncompiled
            or self._failed
            or len(args[0]) < 2
            or is_in_torch_dispatch_mode(include_infra_modes=False)
        ):
            return self._eager(*args)
        try:
            return self._run(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            # Raised before anything of the function has run.
            self._failed = True
            self._compiler.tell(error)
            return self._eager(*args)

    def _run(self, *args: Any) -> Tensor:
        for each in args[: self._rows]:
            torch._dynamo.mark_dynamic(each, 0)
        if self._compiled is None:
            self._compiled = torch.compile(
                self._function, fullgraph=True, dynamic=False, options=_options()
            )
        if torch.is_grad_enabled() in self._ready:
            return self._compiled(*args)
        # Else what backward needs is compiled there, where there is no way back.
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            result = self._compiled(*args)
        self._ready.add(torch.is_grad_enabled())
        return result


def _options() -> dict[str, Any] | None:
    # Else Triton's kernels are chosen by time, and another choice adds in another order.
    known = "deterministic" in torch._inductor.list_options()
    asked = torch.are_deterministic_algorithms_enabled()
    return {"deterministic": True} if known and asked else None
