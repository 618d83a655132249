"""Facts about a device: its name, memory, data-sheet FLOP/s, and nearest shipped profile.

Utilisation (MFU) is relative to the data-sheet FLOP/s. Figures are NVIDIA's for dense matrix
products on tensor cores (since Hopper, data sheets print the doubled figures of sparse ones), from
the data sheets of A100 (2021), H100 and H100 NVL (2024), H200 (2024), L40S (2023), and GB200 NVL72
and HGX B200 (2025). Float32 products run on tensor cores, as TF32, only if
``torch.set_float32_matmul_precision`` allows it.

For GPUs that this table lacks Lightning's table is used. It does not find the H200 and the B200,
has the sparse figures for the H100 NVL, and takes an L40S for an L4, so this table goes first. A
part of a GPU (MIG) has no data sheet, and its peak is unknown.
"""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from pathlib import Path

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.utilities.memory import is_out_of_cpu_memory
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_wlb.attention.backends import kernel_name
from lightning_wlb.cost.profile import Profile, shipped_profiles
from lightning_wlb.distributed.process_groups import gather_from_all_ranks
from lightning_wlb.models.decoder import machine_bytes

FAST_KERNELS = ("flash_attn 3", "flash_attn 4")

_HALF, _TF32, _SINGLE, _DOUBLE = "half", "tf32", "single", "double"
_KINDS = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _TF32, torch.float64: _DOUBLE}

# In TFLOP/s, by a pattern of the device's name; the first pattern that fits counts.
_TABLE = (
    (r"\bGB200\b", {_HALF: 2500.0, _TF32: 1250.0, _SINGLE: 80.0, _DOUBLE: 40.0}),
    (r"\bB200\b", {_HALF: 2250.0, _TF32: 1100.0, _SINGLE: 75.0, _DOUBLE: 37.0}),
    (r"\bH[12]00 NVL\b", {_HALF: 835.5, _TF32: 417.5, _SINGLE: 60.0, _DOUBLE: 60.0}),
    (r"\bH100\b.*(PCIe|HBM2e)", {_HALF: 756.0, _TF32: 378.0, _SINGLE: 51.2, _DOUBLE: 51.2}),
    (r"\bG?H[12]00\b", {_HALF: 989.4, _TF32: 494.7, _SINGLE: 66.9, _DOUBLE: 66.9}),
    (r"\bA100\b", {_HALF: 312.0, _TF32: 156.0, _SINGLE: 19.5, _DOUBLE: 19.5}),
    (r"\bL40S\b", {_HALF: 362.0, _TF32: 183.0, _SINGLE: 91.6}),
)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of matrix products of ``dtype`` on one device; None if they are unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"\bMIG\b", name):
        return None
    kind = _KINDS.get(dtype, "")
    if kind == _TF32 and torch.get_float32_matmul_precision() == "highest":
        kind = _SINGLE
    for pattern, teraflops in _TABLE:
        if re.search(pattern, name, re.IGNORECASE):
            return teraflops[kind] * 1e12 if kind in teraflops else None
    known = get_available_flops(device, dtype)
    return None if known is None else float(known)


def device_name(device: torch.device) -> str:
    """The model of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpus = Path("/proc/cpuinfo")  # Linux has it
    for line in cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int:
    """Memory of the whole device, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_bytes()


def free_bytes(device: torch.device) -> int:
    """The free part of a GPU's memory; for a CPU all of the machine's, since it swaps."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return memory_bytes(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory left."""
    out = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return out or is_out_of_cpu_memory(error)


def shipped_profile(device: torch.device, backend: str = "auto") -> Profile | None:
    """The shipped device profile that is nearest to this device; collective over all ranks.

    A CPU gets the profile ``cpu``, an H100 or H200 its own profile. Other GPUs get the profile that
    is nearest in memory, with a warning. The profile's memory is the least of all ranks' GPUs. The
    result is None for devices that are neither CPU nor CUDA.

    Raises:
        ValueError: the backend is not available.
    """
    if device.type == "cpu":
        return Profile.load("cpu")
    if device.type != "cuda":
        return None
    own = torch.cuda.get_device_properties(device)
    everyone = gather_from_all_ranks(torch.tensor([own.total_memory], device=device))
    return nearest_profile(own.name, int(everyone.min()), kernel_name(backend, device))


def nearest_profile(name: str, memory_bytes: int, kernel: str) -> Profile:
    """The shipped profile of the named GPU, or else the profile that is nearest in memory.

    There is one with the rates of FlashAttention-3 and one with the rates of FlashAttention-2,
    which is slower. All other kernels count as FlashAttention-2, except FlashAttention-4.

    Args:
        kernel: the attention kernel, named as by :func:`.backends.kernel_name`.
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
            " another. Run `lightning-wlb profile --output FILE`; give WLBDataModule(profile=FILE)."
        )
    return replace(found, memory_bytes=memory_bytes)
