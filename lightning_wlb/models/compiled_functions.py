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

Rotary embedding (Su et al., RoFormer): each pair of a head is rotated by its row's position.

Neighbouring pairs of a head are rotated, as in the original. Hugging Face's models rotate the two
halves instead, so that weights are interchangeable only with permuted query and key matrices.

Cost: a table of rows × head_dim / 2 for each micro-batch, computed once for all layers. Eagerly a
rotation is one complex product, with a copy in float32 before and one behind it for half types.
Products of cosines and sines by themselves are five times slower on a CPU, and read and write no
less on any device, unless a compiler makes one kernel of them, which reads and writes heads once.

What is computed between collectives, attention and the head's products, as pure functions.

:data:`EAGER` has them as they are. :meth:`Dense.compiled` has them compiled (:mod:`.compiled`):
inductor then makes one kernel of a norm, one of a rotation, one of SwiGLU's element-wise part, and
two of what the loss does to logits in half types. Backward computes cheap things again rather than
reading them, so that autograd saves less than the memory model counts: of SwiGLU three matrices in
place of four.

Not fused: what lies on two sides of a collective, as the residual sum and the norm behind it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch._functorch.config
import torch._inductor
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.loss import PLAIN, Softmax, log_sum_exp, slope, slope_at_once

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


def rotary_frequencies(positions: Tensor, config: TransformerConfig, dtype: torch.dtype) -> Tensor:
    """For each position and each pair of a head a complex number of modulus 1.

    Args:
        positions: int64 [rows].
        config: for ``head_dim`` and ``rope_theta``.
        dtype: of the hidden states.

    Returns:
        [rows, head_dim / 2], complex128 for float64 models, else complex64, which mixed precision
        leaves alone. Angles are computed in float64, because those of large positions need it.
    """
    assert config.head_dim is not None
    pairs = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float64)
    angles = positions[:, None] * config.rope_theta ** (-pairs / config.head_dim)
    freqs = torch.polar(torch.ones_like(angles), angles)
    return freqs if dtype == torch.float64 else freqs.to(torch.complex64)


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring pairs of [rows, heads, head_dim].

    Args:
        heads: of any floating-point type, which the result has.
        table: ``torch.view_as_real`` of the frequencies, [rows, head_dim / 2, 2].
    """
    wide = heads.to(table.dtype)
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(table)[:, None]).flatten(-2).to(heads)


def rotate_real(heads: Tensor, table: Tensor) -> Tensor:
    """:func:`rotate` in real numbers, for a compiler."""
    even, odd = heads.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table[:, None].unbind(-1)
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return pairs.flatten(-2).to(heads)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm x / sqrt(mean(x²) + eps) · weight along the last dim; [..., dim] -> [..., dim]."""
    return F.rms_norm(hidden, hidden.shape[-1:], weight, eps)


def rotated_heads(hidden: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    """Queries or keys: ``hidden`` [rows, dim] times ``weight``, by heads, rotated by ``table``.

    Args:
        hidden: [rows, dim].
        table: cosines and sines, [rows, head_dim / 2, 2].
        weight: [heads · head_dim, dim].

    Returns:
        [rows, heads, head_dim].
    """
    return rotate(_heads(hidden, table, weight), table)


def _rotated_heads_real(hidden: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    return rotate_real(_heads(hidden, table, weight), table)


def _heads(hidden: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    head_dim = 2 * table.shape[1]
    return F.linear(hidden, weight).unflatten(1, (weight.shape[0] // head_dim, head_dim))


def _log_sum_exp_at_once(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1)


def swiglu(hidden: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """w2(silu(w1 x) * w3 x); [rows, dim] -> [rows, dim]."""
    return F.linear(F.silu(F.linear(hidden, w1)) * F.linear(hidden, w3), w2)


@dataclass(frozen=True)
class Dense:
    """The functions above, or others that are equal to them."""

    rms_norm: Function = rms_norm
    rotated_heads: Function = rotated_heads
    swiglu: Function = swiglu
    softmax: Softmax = PLAIN

    @classmethod
    def compiled(cls) -> Dense:
        """Compiled for one model; one that cannot be runs as it is."""
        compiler = Compiler()
        return cls(
            Compiled(compiler, rms_norm),
            Compiled(compiler, _rotated_heads_real, 2, rotated_heads),
            Compiled(compiler, swiglu),
            Softmax(
                Compiled(compiler, _log_sum_exp_at_once, 1, log_sum_exp),
                Compiled(compiler, slope_at_once, 4, slope),
            ),
        )


EAGER = Dense()
"""The functions as they are."""
