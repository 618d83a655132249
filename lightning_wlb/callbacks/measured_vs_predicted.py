"""Whether a run goes as the cost model predicted: the warning of :class:`.ImbalanceMonitor`.

With a device profile, the monitor predicts every step's plan (:mod:`lightning_wlb.prediction`) and
keeps the predicted step time and imbalance beside the measured ones, by the same definitions. They
are compared once, over the first steps after warm-up. If they differ by more than a fifth, a
warning names the figure and both values: the profile is of another device or of another state of
it, or something runs that the model does not know.

Cost: a prediction takes about a millisecond per micro-batch and step, the comparison nothing.
"""

from __future__ import annotations

import torch

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.training.pipeline_messages import PipelineRank

TOLERANCE = 0.2
"""Fraction by which a measured figure may differ from its prediction without a warning."""

STEPS = 10
"""Timed steps over which the two are compared."""


def run_predictor(
    profile: Profile,
    module: LanguageModule,
    mesh: Mesh,
    pipeline: PipelineRank,
    reduced: torch.dtype,
) -> Predictor:
    """The predictor of a run's steps.

    Raises:
        ValueError: the profile does not fit the mesh, the model, or the run's device or dtype.
    """
    dtype = str(pipeline.dtype).removeprefix("torch.")
    profile.check(device_type=pipeline.device.type, dtype=dtype)
    sums, compiled = str(reduced).removeprefix("torch."), module.compiles_blocks
    latency = LatencyModel(profile, module.model_shape, mesh, sums, compiled)
    return Predictor(latency, pipeline.stages, pipeline.schedule)


def departure(summary: dict[str, float], profile: Profile) -> str | None:
    """The text of a warning if measurement departs from prediction.

    Args:
        summary: the run's figures so far, with those predicted by ``profile``.
        profile: the device's.
    """
    pairs = {"step time (s)": ("seconds_per_step", "seconds_per_step_predicted")}
    for level in ("pipeline", "data", "context"):
        name = f"imbalance_{level}"
        pairs[f"{level}-level imbalance"] = (f"{name}_aggregate", f"{name}_predicted_aggregate")
    apart = [
        f"{name} measured {summary[measured]:.3g}, predicted {summary[predicted]:.3g}"
        for name, (measured, predicted) in pairs.items()
        if abs(summary[measured] - summary[predicted]) > TOLERANCE * summary[predicted]
    ]
    if not apart:
        return None
    return (
        f"Measurement departs from prediction by more than {TOLERANCE:.0%}: {'; '.join(apart)}."
        f" The prediction is by {profile.provenance}. Measure this device with `lightning-wlb"
        " profile`, or look for what else is running on it."
    )
