"""Variable-length attention on CUDA: FlashAttention, from its own packages or from inside torch.

Each loader imports a library and returns its function as a :class:`.Kernel`, or raises ImportError
with the reason. All libraries align the causal mask at the bottom right, group queries without
repeating keys, support only float16 and bfloat16, and skip tiles of keys outside a sliding window.

Options that a library lacks (:mod:`.backends` has a table) are refused, as are versions of 2.x
before 2.7, some of which cap scores only in forward.

Backward sums the gradients of queries by atomic additions, whose order differs from call to call,
unless ``torch.use_deterministic_algorithms`` is on. Torch's own kernel checks that setting itself
(except in its warn-only mode); the packages get an argument. Determinism takes more memory: in 2.x
and torch, with few segments and heads, several times the float32 gradient of the queries.

This project has not run these kernels on a GPU. Without a GPU the tests call torch's own operators
on tensors without memory, and compare with the parameters of the packages' releases.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_wlb.attention.kernel_interface import (
    AttentionOptions,
    Kernel,
    gradient_of_sinks,
    with_sinks,
)
from lightning_wlb.attention.metadata import AttentionMetadata

PACKAGES = {3: "flash_attn_interface", 2: "flash_attn", 4: "flash_attn.cute"}
"""FlashAttention's generations and the module of each."""

_ARGUMENTS = (
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "causal", "window_size", "deterministic"),
)

_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default


def load_torch() -> Kernel:
    """FlashAttention-2 as built into torch: ``torch.nn.attention.varlen``."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters

    def attention(
        q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, options: AttentionOptions
    ) -> Tensor:
        if options.softcap is not None:
            raise ValueError(
                f"softcap={options.softcap}: attention backend 'torch' cannot cap scores. Install"
                " flash-attn 2.7 or newer (2.x) and give attention_backend='flash', or 'auto'."
            )
        left = -1 if options.sliding_window is None else options.sliding_window - 1
        if options.sinks is not None:
            return _attend_with_sinks(q, k, v, options.sinks, metadata, options.scale, left)
        # torch 2.11 accepts fewer key than query heads; later versions need an argument for it.
        grouped: dict[str, Any] = {}
        if q.shape[1] != k.shape[1] and "enable_gqa" in known:
            grouped["enable_gqa"] = True
        out = varlen_attn(
            q,
            k,
            v,
            metadata.cu_seqlens_q,
            metadata.cu_seqlens_k,
            metadata.max_seqlen_q,
            metadata.max_seqlen_k,
            scale=options.scale,
            window_size=(left, 0),  # 0 keys to the right: causal
            **grouped,
        )
        assert isinstance(out, Tensor)  # a tuple only if log-sum-exp is requested
        return out

    return attention


def load_flash() -> tuple[str, Kernel]:
    """The FlashAttention package for the device, with the kernel's name; :func:`.flash_library`."""
    function, generation = flash_library()

    def attention(
        q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, options: AttentionOptions
    ) -> Tensor:
        if options.sinks is not None:
            raise ValueError(
                "attention backend 'flash' has no sinks: the packages do not show the backward"
                " that their gradient needs. Give attention_backend='torch'."
            )
        # The value for "no window" differs between generations, so take their default.
        extra: dict[str, Any] = {}
        if _is_deterministic(generation, q.shape[2]):
            extra["deterministic"] = True
        if options.sliding_window is not None:
            extra["window_size"] = (options.sliding_window - 1, 0)
        if options.softcap is not None:
            if generation == 4:
                raise ValueError(
                    f"softcap={options.softcap}: flash-attn 4 cannot cap packed scores in backward."
                    " Install flash-attn 2 (2.7 or newer), or FlashAttention-3 on Hopper."
                )
            extra["softcap"] = options.softcap
        # By keyword, because the order of parameters differs between generations.
        result = function(
            q,
            k,
            v,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=metadata.cu_seqlens_k,
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_seqlen_k,
            softmax_scale=options.scale,
            causal=True,
            **extra,
        )
        # 4.x and early 3.x return (out, log-sum-exp), the others only the output.
        return result[0] if isinstance(result, tuple) else result

    return f"flash_attn {generation}", attention


class _AttentionWithSinks(torch.autograd.Function):
    """The operators behind ``varlen_attn``, in forward and backward, with sinks merged in."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        metadata: AttentionMetadata,
        scale: float | None,
        left: int,
    ) -> Tensor:
        bounds = metadata.cu_seqlens_q, metadata.cu_seqlens_k
        ctx.most = metadata.max_seqlen_q, metadata.max_seqlen_k
        ctx.causal = left == -1  # else causal by its window, as in varlen_attn
        ctx.rest = {"scale": scale, "window_size_left": left, "window_size_right": 0}
        out, lse, rng, unused, _ = _forward(
            q, k, v, *bounds, *ctx.most, 0.0, ctx.causal, False, **ctx.rest
        )
        # The kernel's log-sum-exp is [heads, queries].
        merged, lse = with_sinks(out, lse.T, sinks)
        out, lse = merged.to(q.dtype), lse.T.contiguous()
        ctx.save_for_backward(q, k, v, out, lse, sinks, *bounds, rng, unused)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *bounds, rng, unused = ctx.saved_tensors
        tensors = grad_out, q, k, v, out, lse, *bounds
        gradients = _backward(*tensors, *ctx.most, 0.0, ctx.causal, rng, unused, **ctx.rest)
        return *gradients, gradient_of_sinks(grad_out, out, lse.T, sinks), None, None, None


_attend_with_sinks: Callable[..., Tensor] = _AttentionWithSinks.apply


def flash_library() -> tuple[Callable[..., Any], int]:
    """The library's own function and its generation: 2, 3 or 4.

    On Hopper 3.x, which runs only there, goes first. 4.x goes last: it is an alpha without a
    backward before Hopper. A package that cannot be imported or called is left out with a warning.

    Raises:
        ImportError: there is no usable library; the message has the reasons.
    """
    major = torch.cuda.get_device_capability()[0]
    reasons = []
    for generation in (3, 2, 4) if major == 9 else (2, 4) if major > 9 else (2,):
        name = PACKAGES[generation]
        try:
            package = import_module(name)
            if generation == 2:
                # If only 4.x is installed, it leaves an empty namespace under the name of 2.x.
                if not hasattr(package, "__version__"):
                    raise ModuleNotFoundError("No module named 'flash_attn' of 2.x", name=name)
                if tuple(map(int, str(package.__version__).split(".")[:2])) < (2, 7):
                    raise ImportError(f"version {package.__version__} is older than 2.7")
            function = package.flash_attn_varlen_func
            inspect.signature(function).bind(None, None, None, **dict.fromkeys(_ARGUMENTS))
        except Exception as reason:
            # A broken package may raise any exception of a compiled extension or kernel compiler.
            reasons.append(f"{name} ({generation}.x): {reason}")
            missing = getattr(reason, "name", None) if type(reason) is ModuleNotFoundError else None
            if missing is None or not f"{name}.".startswith(f"{missing}."):
                warnings.warn(
                    f"{name} is installed, but cannot be used: {type(reason).__name__}: {reason}."
                    f" Versions known to fit are 2.7 or newer, 3.0 and 4.0 of January 2026 or"
                    " later, built for this torch and CUDA. Attention takes the next kernel.",
                    stacklevel=2,
                )
            continue
        return function, generation
    raise ImportError("; ".join(reasons))


def _is_deterministic(generation: int, head_dim: int) -> bool:
    """Whether backward must be deterministic; ValueError if the library cannot do that."""
    if not torch.are_deterministic_algorithms_enabled():
        return False
    if generation == 3 and head_dim > 192:
        lacking = f"FlashAttention-3 has no deterministic backward for heads of {head_dim}"
    elif generation == 4 and torch.cuda.get_device_capability()[0] == 12:
        lacking = "FlashAttention-4 has no deterministic backward on devices of capability 12"
    else:
        return True
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise ValueError(
            f"{lacking}, which torch.use_deterministic_algorithms asks for. Give"
            " attention_backend='torch', or turn it off (Trainer(deterministic=False))."
        )
    warnings.warn(f"{lacking}: a resumed run may differ in the last bits.", stacklevel=3)
    return False
