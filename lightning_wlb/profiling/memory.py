"""How much memory a device has, and whether an error says that there was no more of it."""

from __future__ import annotations

import os

import torch
from lightning.pytorch.utilities.memory import is_out_of_cpu_memory


def memory_bytes(device: torch.device) -> int:
    """Of the whole device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes(device: torch.device) -> int:
    """What nobody uses now of a GPU's memory; of a CPU, which swaps, all there is."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return memory_bytes(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory left."""
    out = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return out or is_out_of_cpu_memory(error)
