"""Part 2: device profiles of real layers, and how well they predict what was held out of the fit.

A profile is written to ``gpu_profile_<layers>.json``. Parts that predict begin with a row that asks
:func:`measured`, which takes the file where it is of this device and of this torch, and measures
otherwise. Where that fails their other rows go by the profile that is shipped.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.recording import Figures, Row, Run, machine
from lightning_wlb.cost.profile import Profile
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.profiling.device import shipped_profile
from lightning_wlb.profiling.device_profile import measure
from lightning_wlb.profiling.measured_points import Grid

LAYERS = ("7b", "llama3-8b")
"""Presets: as many key and value heads as query heads, and a quarter of them."""

SMALL_GRID = Grid(
    queries=(1, 64), keys_per_query=(1.0, 4.0), pairs=2**14, rows=(32, 128), repeats=1, held_out=2
)


def dtype_of(device: torch.device) -> torch.dtype:
    """What is computed in: bfloat16, but float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def path_of(run: Run, name: str) -> Path:
    """The file of a profile."""
    return run.output / f"gpu_profile_{name}.json"


def measured(run: Run, name: str, config: TransformerConfig) -> Profile:
    """The profile of a model's layers on this device, from its file or measured now.

    Args:
        run: with the device; a small run measures the least that a profile can be made of.
        name: of the layers, in the file's name.
        config: whose layers are measured.
    """
    path = path_of(run, name)
    if path.exists():
        kept = Profile.load(str(path))
        here = machine(run.device)["device"] if run.device.type == "cuda" else kept.device
        if kept.device == here and f"torch {torch.__version__} " in kept.sources[0]:
            return kept
        path.unlink()
    torch.set_num_threads(1)
    profile = measure(
        config,
        name=f"measured-{name}",
        device=run.device,
        dtype=dtype_of(run.device),
        grid=SMALL_GRID if run.small else None,
        links=False,
    )
    path.write_text(profile.to_json(), encoding="utf-8")
    return profile


def profile_for(run: Run, name: str) -> Profile:
    """The profile that :func:`measured` has written, or else the shipped one of this device."""
    path = path_of(run, name)
    found = Profile.load(str(path)) if path.exists() else shipped_profile(run.device)
    assert found is not None, "a CPU or a CUDA device"
    return found


def rows(run: Run) -> list[Row]:
    """One for each of :data:`LAYERS`."""
    configs = {name: TransformerConfig.preset(name) for name in LAYERS}
    if run.small:
        configs = {"tiny": TransformerConfig.preset("tiny")}
    return [(name, partial(_row, run, name, config)) for name, config in configs.items()]


def _row(run: Run, name: str, config: TransformerConfig) -> dict[str, Any]:
    path_of(run, name).unlink(missing_ok=True)  # this part is what measures
    profile = measured(run, name, config)
    (attention,) = profile.attention
    return {
        "file": path_of(run, name).name,
        "held_out": dict(profile.errors),
        "peak_flops": profile.peak_flops,
        "element_bytes_per_second": profile.element_bytes_per_second,
        "most_attention_flops": [
            max(map(max, each)) for each in (attention.forward, attention.backward)
        ],
        "most_layer_flops": [max(profile.layer.forward), max(profile.layer.backward)],
        "most_head_flops": [max(profile.head.forward), max(profile.head.backward)],
        "action_ns": list(profile.action.ns),
        "parameter_ns": profile.action.parameter_ns,
    }


def profile_row(run: Run, name: str, config: TransformerConfig) -> dict[str, Any]:
    """The row of a part that predicts."""
    profile = measured(run, name, config)
    return {"held_out": dict(profile.errors), "peak_flops": profile.peak_flops}


def summary(done: Figures) -> dict[str, Any]:
    """The median error of predictions, of all layers."""
    return {"median_error": {name: row["held_out"]["median"] for name, row in done.items()}}
