"""Stand-ins for the packages of FlashAttention, which need CUDA to be installed.

They have the parameters of those that were released, and note how they are called.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_wlb.attention import kernels_gpu


def on_device_of(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))


# Parameters of flash_attn_varlen_func after q, k and v, as released: 2.8.3, 3.0.0 and 4.0.0b36.
FLASH_2 = (
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size"
    " softcap alibi_slopes deterministic return_attn_probs block_table"
)
FLASH_3 = (
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal"
    " qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa"
    " deterministic sm_margin return_attn_probs"
)
FLASH_4 = (
    "qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k"
    " gather_kv_indices page_table softmax_scale causal window_size learnable_sink softcap"
    " num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod block_sparse_tensors"
    " aux_tensors aux_scalars return_lse scheduler_metadata seqlen_k_per_split"
    " disable_scheduler_metadata gather_bwd_recompute_p gather_bwd_token_chunk"
)


def fake_flash(monkeypatch: pytest.MonkeyPatch, *versions: str) -> list[dict[str, Any]]:
    """Put packages of these versions (or none) in the place of the real ones; calls of theirs."""
    calls: list[dict[str, Any]] = []
    installed: dict[str, Any] = dict.fromkeys(kernels_gpu.PACKAGES.values())
    if any(version[0] in "24" for version in versions):  # 4.x alone leaves a namespace
        installed["flash_attn"] = types.ModuleType("flash_attn")
    for version in versions:
        package = installed[kernels_gpu.PACKAGES[int(version[0])]] or types.ModuleType(version)
        installed[kernels_gpu.PACKAGES[int(version[0])]] = package
        known = {"2": FLASH_2, "3": FLASH_3, "4": FLASH_4}[version[0]]
        package.flash_attn_varlen_func = flash_function(known, version[0] == "4", calls)
        if version[0] == "2":
            package.__version__ = version
    for name, module in installed.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def flash_function(known: str, with_lse: bool, calls: list[dict[str, Any]]) -> Any:
    """A function with these parameters that notes how it is called."""

    def called(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        assert set(arguments) <= set(known.split())
        calls.append(arguments)
        return (q.clone(), torch.zeros(())) if with_lse else q.clone()

    named = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in ["q", "k", "v", *known.split()]
    ]
    called.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return called
