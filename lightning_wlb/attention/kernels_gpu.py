"""Variable-length attention on CUDA: FlashAttention, from its own package or from inside torch.

Each loader imports a library and returns its function as a :class:`.kernel.Kernel`, or raises
ImportError with the reason. All three libraries align the causal mask at the bottom right, take
grouped-query attention as it is, know float16 and bfloat16 only, and read no tile of keys outside
of a sliding window.

This project has not run them on a GPU. Without one the tests call torch's own operator on tensors
without memory and compare with flash_attn's parameters as released; tests marked ``gpu`` compare
with dense attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_wlb.attention.kernel import AttentionOptions, Kernel
from lightning_wlb.attention.metadata import AttentionMetadata


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
        if options.softcap is not None or options.sinks is not None:
            raise ValueError("backend 'torch' has no softcap and no sinks yet.")
        left = -1 if options.sliding_window is None else options.sliding_window - 1
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


def load_flash() -> Kernel:
    """The ``flash_attn`` package: 2.x, else 4.x (``flash_attn.cute``).

    Both may be installed side by side; 2.x goes first because 4.x declares itself alpha. 4.x must
    be of January 2026 or later: older versions do not take the longest lengths.
    """
    function = flash_function()

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        if options.softcap is not None or options.sinks is not None:
            raise ValueError("backend 'flash' has no softcap and no sinks yet.")
        # What stands for none is not the same in 2.x and 4.x: their own default.
        extra: dict[str, Any] = {}
        if options.sliding_window is not None:
            extra["window_size"] = (options.sliding_window - 1, 0)
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

    return attention


def flash_function() -> Callable[..., Any]:
    """The library's own function; raises ImportError, with the reason, where there is none."""
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
    else:
        version = str(flash_attn.__version__)
        if tuple(int(part) for part in version.split(".")[:2]) < (2, 1):
            raise ImportError(
                f"flash-attn {version} aligns causal masks at the top left; 2.1 or newer is needed"
            )
    function: Callable[..., Any] = flash_attn_varlen_func
    return function
