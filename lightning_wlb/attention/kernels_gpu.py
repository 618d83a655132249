"""Variable-length attention on CUDA: FlashAttention, from its own package or from inside torch.

Each loader imports a library and returns its function as a :class:`.kernel.Kernel`, or raises
ImportError with the reason. All three libraries align the causal mask at the bottom right, take
grouped-query attention as it is, know float16 and bfloat16 only, and read no tile of keys outside
of a sliding window.

Sinks take torch's kernel, between whose forward and backward :mod:`.sinks` stands; the package does
not show its backward. A soft cap takes the package in version 2.6.2 or newer: torch's kernel has
none, older versions and 4.x have none in their backward. What is missing is refused.

This project has not run them on a GPU, sinks and caps included. Without one the tests call torch's
own operators on tensors without memory and compare with flash_attn's parameters as released; tests
marked ``gpu`` compare with dense attention.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_wlb.attention.kernel import AttentionOptions, Kernel
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.attention.sinks import gradient_of_sinks, with_sinks

_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default


def load_torch() -> Kernel:
    """FlashAttention-2 as built into torch: ``torch.nn.attention.varlen`` (torch 2.11 or newer)."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known:
        raise ImportError(
            f"varlen_attn of torch {torch.__version__} has no window_size; 2.11 or newer is needed"
        )

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        if options.softcap is not None:
            raise ValueError(
                f"softcap={options.softcap}: attention backend 'torch' cannot cap scores. Install"
                " flash-attn 2.6.2 or newer (2.x) and give attention_backend='flash', or 'auto'."
            )
        left = -1 if options.sliding_window is None else options.sliding_window - 1
        if options.sinks is not None:
            return _attend_with_sinks(q, k, v, options.sinks, metadata, options.scale, left)
        # torch 2.11 takes fewer key than query heads as they are; later versions want to be told.
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
            window_size=(left, 0),  # how this function spells causal
            **grouped,
        )
        assert isinstance(out, Tensor)  # a tuple only where log-sum-exp was asked for
        return out

    return attention


def load_flash() -> tuple[str, Kernel]:
    """The ``flash_attn`` package, with its name: 2.x, else 4.x (``flash_attn.cute``).

    Both may be installed side by side; 2.x goes first because 4.x declares itself alpha. 4.x must
    be of January 2026 or later: older versions do not take the longest lengths.
    """
    function, version = flash_library()

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        if options.sinks is not None:
            raise ValueError(
                "attention backend 'flash' has no sinks: the package does not show the backward"
                " that their gradient needs. Give attention_backend='torch'."
            )
        # What stands for none is not the same in 2.x and 4.x: their own default.
        extra: dict[str, Any] = {}
        if options.sliding_window is not None:
            extra["window_size"] = (options.sliding_window - 1, 0)
        if options.softcap is not None:
            if not (2, 6, 2) <= version < (3,):
                found = ".".join(map(str, version))
                raise ValueError(
                    f"softcap={options.softcap}: flash-attn {found} has no backward that caps"
                    " scores of packed segments. Install flash-attn 2.6.2 or newer, of 2.x."
                )
            extra["softcap"] = options.softcap
        # By keyword: 2.x and 4.x order their parameters differently.
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
        # 4.x returns (out, log-sum-exp), 2.x the output alone.
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return f"flash_attn {version[0]}", attention


class _AttentionWithSinks(torch.autograd.Function):
    """What ``varlen_attn`` calls in forward and in backward, with sinks merged in between."""

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
        gradients = _backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse,
            *bounds,
            *ctx.most,
            0.0,
            ctx.causal,
            rng,
            unused,
            **ctx.rest,
        )
        return *gradients, gradient_of_sinks(grad_out, out, lse.T, sinks), None, None, None


_attend_with_sinks: Callable[..., Tensor] = _AttentionWithSinks.apply


def flash_library() -> tuple[Callable[..., Any], tuple[int, ...]]:
    """The library's own function and its version, which is (4,) for any 4.x.

    Raises:
        ImportError: with the reason, where there is none.
    """
    try:
        import flash_attn
        from flash_attn import flash_attn_varlen_func
    except ImportError as missing:
        try:
            from flash_attn.cute import flash_attn_varlen_func
        except ImportError as also_missing:
            raise ImportError(
                f"neither flash-attn 2.x ({missing}) nor flash-attn-4 ({also_missing})"
            ) from also_missing
        return flash_attn_varlen_func, (4,)
    version = tuple(map(int, re.findall(r"\d+", str(flash_attn.__version__))[:3]))
    if version < (2, 1):
        raise ImportError(
            f"flash-attn {flash_attn.__version__} aligns causal masks at the top left; 2.1 or newer"
            " is needed"
        )
    return flash_attn_varlen_func, version
