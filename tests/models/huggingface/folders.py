"""Folders of weights as transformers writes them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch


def plain_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of a config, with random values for whatever a folder holds."""
    from transformers import AutoModelForCausalLM

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **eager, dtype=dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if name in (model._keep_in_fp32_modules_strict or ()) and dtype == torch.bfloat16:
                module._buffers[name] = buffer.float()
    generator = torch.Generator().manual_seed(0)
    stored = {id(each): each for each in model.state_dict(keep_vars=True).values()}
    with torch.no_grad():
        for tensor in stored.values():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.add_((noise * 0.1).to(tensor.dtype))
    return model.eval()


def write(folder: Path, config: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """``save_pretrained`` of :func:`plain_model`, which is returned."""
    model = plain_model(config, dtype)
    model.save_pretrained(folder, **options)
    return model
