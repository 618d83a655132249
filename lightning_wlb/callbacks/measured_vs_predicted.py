"""Whether a run goes as the cost model predicted: the warning of :class:`.ImbalanceMonitor`.

The prediction itself is made in :mod:`lightning_wlb.prediction`. With a device profile, the monitor
predicts every step's plan and keeps the predicted step time and imbalance next to the measured
ones, in the same definitions. Here they are compared once, over the first steps that count: where
they differ by more than a fifth, a warning names the figure and both values. Then the profile is of
another device or of another state of it, or something runs that the model does not know.

Cost: a prediction takes about a millisecond per micro-batch and step, the comparison nothing.
"""

from __future__ import annotations

import torch

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.training.messages import Pipeline

TOLERANCE = 0.2
"""Part by which a measured figure may differ from its prediction before it is worth a warning."""

STEPS = 10
"""Steps over which the two are compared."""


def run_predictor(
    profile: Profile, module: LanguageModule, mesh: Mesh, pipeline: Pipeline, reduced: torch.dtype
) -> Predictor:
    """The predictor of a run's steps.

    Args:
        profile: of the device that trains.
        module: for the model's shape.
        mesh: that trains.
        pipeline: for the layers of each stage, the schedule, and the device and dtype of the run.
        reduced: the dtype of sums over tensor- and context-parallel ranks.

    Raises:
        ValueError: a profile that does not fit the mesh, the model or its dtype.
    """
    dtype = str(pipeline.dtype).removeprefix("torch.")
    profile.check(device_type=pipeline.device.type, dtype=dtype)
    latency = LatencyModel(profile, module.model_shape, mesh, str(reduced).removeprefix("torch."))
    return Predictor(latency, pipeline.stages, pipeline.schedule)


def departure(summary: dict[str, float], profile: Profile) -> str | None:
    """Where measurement departs from prediction, as a warning; None where it does not.

    Args:
        summary: of the run so far, with predicted figures.
        profile: the prediction was made with it.
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
