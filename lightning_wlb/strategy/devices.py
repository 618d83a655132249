"""The device profile of the devices that a run has, where nobody gave one.

A CPU gets the shipped profile ``cpu``, an H100 or H200 its own, with the rates of the attention
kernel that the run uses: there is one of FlashAttention-3 and one of FlashAttention-2. Of other
GPUs none is shipped: they get the one of the shipped that is nearest in memory, with a warning, and
the memory that they have. Other kernels are taken for FlashAttention-2, the slower one, except
FlashAttention-4. Not for a device that was profiled: give ``WLBDataModule(profile=...)``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_wlb.attention.varlen import kernel_name
from lightning_wlb.cost.profile import Profile, shipped_profiles
from lightning_wlb.distributed.process_groups import gather_from_all_ranks

FAST_KERNELS = ("flash_attn 3", "flash_attn 4")


def profile_of(device: torch.device, backend: str = "auto") -> Profile | None:
    """The profile nearest to this device; collective over all ranks.

    Its memory is that of the GPU that has least. None for devices that are neither CPU nor CUDA.

    Args:
        device: of this rank.
        backend: of attention.

    Raises:
        ValueError: the backend is not there.
    """
    if device.type == "cpu":
        return Profile.load("cpu")
    if device.type != "cuda":
        return None
    own = torch.cuda.get_device_properties(device)
    everyone = gather_from_all_ranks(torch.tensor([own.total_memory], device=device))
    return nearest(own.name, int(everyone.min()), kernel_name(backend, device))


def nearest(name: str, memory_bytes: int, kernel: str) -> Profile:
    """The shipped profile of the GPU of this name, or else the one that is nearest in memory.

    Args:
        name: of the GPU.
        memory_bytes: that it has.
        kernel: of attention, as :func:`.varlen.kernel_name` calls it.
    """
    shipped = [Profile.load(each) for each in shipped_profiles()]
    gpus = [
        each
        for each in shipped
        if each.device_type == "cuda" and (each.kernel in FAST_KERNELS) == (kernel in FAST_KERNELS)
    ]
    named = [each for each in gpus if each.name.split("-")[0].upper() in name.upper()]
    found = min(named or gpus, key=lambda each: abs(each.memory_bytes - memory_bytes))
    if not named:
        rank_zero_warn(
            f"There is no device profile of {name}. Steps are predicted by the analytic profile"
            f" {found.name!r} with {memory_bytes / 1e9:.0f} GB of memory: the best mesh may be"
            " another one. Measure the device with `lightning-wlb profile --output FILE`, and give"
            " WLBDataModule(profile=FILE)."
        )
    return replace(found, memory_bytes=memory_bytes)
