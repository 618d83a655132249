"""Norm, rotary embedding and SwiGLU as pure functions of rows, eager or by ``torch.compile``.

:data:`EAGER` has the eager functions; :meth:`BlockFunctions.compiled` makes compiled ones, for
``LanguageModule(compile=True)``. Inductor then makes one kernel of a norm, one of a rotation, one
of SwiGLU, and two of the loss's work on logits in half types. Autograd saves less than the memory
model counts (for SwiGLU three matrices instead of four).

A function is compiled once for any number of rows, as one graph. If it does not compile on a rank,
the run ends, since other ranks would wait for that rank in every step. It runs uncompiled on fewer
than two rows, for which inductor would compile again, and under a dispatch mode.

Cost: seconds of compiler time per function, at its first call with gradients and at its first call
without; some tens of microseconds of checks per call. Do not use it for functions that communicate
or call kernels of their own, nor for small layers on a CPU, where checks cost more than it saves.

So far it has run only on CPUs. On CUDA inductor chooses among Triton's kernels by time, so that the
order of sums may differ between processes, unless ``torch.use_deterministic_algorithms`` is on.
"""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lightning_wlb.data.cache import cache_folder
from lightning_wlb.data.loader_workers import safe_path
from lightning_wlb.file_checks import check_owner, follow, own_folder
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.loss import (
    EAGER_SOFTMAX,
    Function,
    Softmax,
    log_sum_exp,
    logits_gradient,
    logits_gradient_at_once,
)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm x / sqrt(mean(x²) + eps) · weight along the last dim; [..., dim] -> [..., dim]."""
    return F.rms_norm(hidden, hidden.shape[-1:], weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The activation of a feed-forward network, silu(gate) * up; [rows, ffn_dim] each."""
    return F.silu(gate) * up


def rotary_frequencies(positions: Tensor, config: TransformerConfig, dtype: torch.dtype) -> Tensor:
    """The rotary embedding (Su et al., RoFormer): a complex number of modulus 1 for each pair.

    Neighbouring pairs of a head are rotated, as in the paper. Hugging Face's models rotate the two
    halves instead, so weights are interchangeable only with permuted query and key matrices.

    Args:
        positions: int64 [rows], each row's position in its document.
        dtype: dtype of the hidden states.

    Returns:
        [rows, head_dim / 2], complex128 for float64 models, else complex64, which mixed precision
        does not cast. Angles are computed in float64, which large positions need.
    """
    assert config.head_dim is not None
    pairs = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float64)
    angles = positions[:, None] * config.rope_theta ** (-pairs / config.head_dim)
    freqs = torch.polar(torch.ones_like(angles), angles)
    return freqs if dtype == torch.float64 else freqs.to(torch.complex64)


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring pairs of queries or keys, by one complex product.

    Eager products of cosines and sines are five times slower on a CPU, and save no memory traffic.

    Args:
        heads: [rows, heads, head_dim] of any floating-point type; the result has the same type.
        table: ``torch.view_as_real`` of the frequencies, [rows, head_dim / 2, 2].
    """
    wide = heads.to(table.dtype)
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(table)[:, None]).flatten(-2).to(heads)


def rotate_real(heads: Tensor, table: Tensor) -> Tensor:
    """:func:`rotate` in real numbers, from which a compiler makes one kernel."""
    even, odd = heads.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table[:, None].unbind(-1)
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return pairs.flatten(-2).to(heads)


def _log_sum_exp_at_once(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1)


@dataclass(frozen=True)
class BlockFunctions:
    """The functions of a model between products, collectives and attention."""

    rms_norm: Function = rms_norm
    rotate: Function = rotate
    swiglu: Function = swiglu
    softmax: Softmax = EAGER_SOFTMAX

    @classmethod
    def compiled(cls) -> BlockFunctions:
        """The functions compiled for one model."""
        return cls(
            CompiledFunction(rms_norm),
            CompiledFunction(rotate_real, 2, rotate),
            CompiledFunction(swiglu, 2),
            Softmax(
                CompiledFunction(_log_sum_exp_at_once, 1, log_sum_exp),
                CompiledFunction(logits_gradient_at_once, 4, logits_gradient),
            ),
        )


EAGER = BlockFunctions()
"""The eager functions."""

_MEANWHILE = ExitStack()
"""Holds :func:`.safe_path` from the beginning of a compilation to its end."""


class CompiledFunction:
    """A function that is compiled at its first call.

    Args:
        function: pure; it returns a tensor.
        rows: number of leading arguments that are tensors whose first dim varies.
        eager: an equal function that is faster uncompiled; ``function`` if None.
    """

    def __init__(self, function: Function, rows: int = 1, eager: Function | None = None) -> None:
        self._function, self._rows = function, rows
        self._eager = eager or function
        self._compiled: Function | None = None

    def __call__(self, *args: Any) -> Tensor:
        """The function's value; raises RuntimeError, with the cause, if ``torch.compile`` fails."""
        dispatching = is_in_torch_dispatch_mode(include_infra_modes=False)
        if len(args[0]) < 2 or dispatching:
            return self._eager(*args)
        for each in args[: self._rows]:
            torch._dynamo.mark_dynamic(each, 0)
        if _use_own_cache not in callback_handler.start_callbacks:  # torch.compiler.reset drops it
            callback_handler.register_start_callback(_use_own_cache)
            # Inductor starts ``python -c``, which would import from the working folder.
            callback_handler.register_start_callback(
                lambda _: _MEANWHILE.enter_context(safe_path())
            )
            callback_handler.register_end_callback(lambda _: _MEANWHILE.close())
        if self._compiled is None:
            # Else Triton's kernels are chosen by time, which changes the order of sums.
            known = "deterministic" in torch._inductor.list_options()
            deterministic = known and torch.are_deterministic_algorithms_enabled()
            options: dict[str, Any] | None = {"deterministic": True} if deterministic else None
            _use_own_cache()  # torch.compile evaluates text of its bisection that lies in there
            self._compiled = torch.compile(
                self._function, fullgraph=True, dynamic=False, options=options
            )
        try:
            return self._compiled(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            cause = " ".join(str(error).strip().partition("\n\n")[0].split())
            raise RuntimeError(
                f"compile=True: torch.compile fails on {self._function.__name__}:"
                f" {type(error).__name__}: {cause} If a C++ compiler is missing, install one (g++,"
                " or set CXX); if other models of this process have reached the limit of"
                " recompilations, call torch.compiler.reset() between them; else set compile=False."
            ) from error


def _use_own_cache(_: object = None) -> None:
    """Keep inductor's pickles and libraries where no other user can have put any.

    torch's default is a folder of a known name among temporary files, whoever made it. A folder
    that the environment names is used if it is this user's or root's, and no stranger has made a
    folder that leads there. Called before torch.compile, and at each compilation.
    """
    default, theirs = Path(default_cache_dir()), False
    try:
        own_folder(default)
    except (OSError, ValueError):
        theirs = True
        # torch would keep precompiled headers in its default, whatever the environment says.
        torch._inductor.config.cpp_cache_precompile_headers = False
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        real, strange = follow(named := Path(os.environ.get(name, default)))
        if follow(default)[0] in (real, *real.parents):  # torch sets names below the default
            if theirs:
                os.environ.pop(name, None)
            continue
        try:
            if strange:
                raise ValueError(f"{min(strange)}, which leads there, is another user's.")
            named.mkdir(parents=True, exist_ok=True)
            check_owner(named.stat(), named, [0])
        except (OSError, ValueError) as error:
            del os.environ[name]
            warnings.warn(f"{name} is not used: {error}", stacklevel=4)
    if theirs and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "torchinductor")
