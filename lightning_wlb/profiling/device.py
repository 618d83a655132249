"""What a device is: its name, its memory, and the FLOP/s of its data sheet.

Utilisation (MFU) is relative to that peak. Figures are NVIDIA's, of dense matrix products on tensor
cores (since Hopper, data sheets print those of sparse ones, twice as many), from the data sheets of
A100 (2021), H100 and H100 NVL (2024), H200 (2024), L40S (2023), and GB200 NVL72 and HGX B200
(2025). Float32 is done on tensor cores, as TF32, only where
``torch.set_float32_matmul_precision`` allows it.

Lightning's table is asked for GPUs that ours lacks. It does not find the H200 and the B200, has the
sparse figures for the H100 NVL, and takes an L40S for an L4, so ours goes first. A part of a GPU
(MIG) has no data sheet, and its peak is unknown.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.utilities.memory import is_out_of_cpu_memory

_HALF, _TF32, _SINGLE, _DOUBLE = "half", "tf32", "single", "double"
_KINDS = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _TF32, torch.float64: _DOUBLE}

# In TFLOP/s, by a pattern of the device's name; the first that fits counts.
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
    """FLOP/s of matrix products of ``dtype`` on one device; None where nobody states them."""
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
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes(device: torch.device) -> int:
    """The part of a GPU's memory that nobody uses now; all of a machine's, which swaps."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return memory_bytes(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory left."""
    out = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return out or is_out_of_cpu_memory(error)
