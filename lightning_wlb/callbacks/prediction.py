"""What the cost model predicted, beside what was measured.

Each step's plan is simulated with a device profile; step time and imbalance at every level are
kept next to the measured ones, in the same definitions. Where the two part by more than a fifth
over the first steps that count, one warning says at which level and by how much: the profile is of
another device or another state of it, or something runs that the model does not know.

Cost: the prediction, about a millisecond per micro-batch and step.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lightning_wlb.callbacks import imbalance
from lightning_wlb.callbacks.imbalance import Level
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import StepPlan
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.strategy.messages import Pipeline

TOLERANCE = 0.2
"""Part by which a measured figure may differ from its prediction before it is worth a warning."""

STEPS = 10
"""Steps over which the two are compared."""


class Predicted(NamedTuple):
    """One step as the cost model sees it; NaN without a profile."""

    seconds: float
    pipeline: Level
    data: Level
    context: Level


NOTHING = Predicted(float("nan"), *(Level(float("nan"), float("nan")),) * 3)


class Predictions:
    """Predicts the steps of one run.

    Args:
        profile: name of a shipped profile, path of one, or a profile.
        module: for the model's shape and its activation checkpointing.
        pipeline: for the mesh, the stages and the schedule.

    Raises:
        ValueError: a profile that does not fit the mesh, the model or its dtype.
    """

    def __init__(
        self, profile: str | Path | Profile, module: LanguageModule, pipeline: Pipeline
    ) -> None:
        self.profile = profile if isinstance(profile, Profile) else Profile.load(profile)
        dtype = str(pipeline.dtype).removeprefix("torch.")
        self.profile.check(device_type=pipeline.device.type, dtype=dtype)
        mesh, checkpointing = pipeline.at.mesh, module.activation_checkpointing
        latency = LatencyModel(self.profile, module.model_shape, mesh, checkpointing, dtype)
        self._predictor = Predictor(latency, pipeline.stages, pipeline.schedule)

    def predict(self, plan: StepPlan, slots: int) -> Predicted:
        """One step.

        Args:
            plan: what runs.
            slots: K of the pipeline level, see :func:`imbalance.slots`.
        """
        step = self._predictor.predict(plan)
        work = step.work_ns.astype(float)
        return Predicted(
            seconds=step.total_ns / 1e9,
            pipeline=imbalance.pipeline_level(work, slots),
            data=imbalance.data_level(work),
            context=Level(*step.context_ns),
        )


def parted(summary: dict[str, float], profile: Profile) -> str | None:
    """Where measurement departs from prediction, in a sentence; None where it does not.

    Args:
        summary: of the run so far, with predicted figures.
        profile: that the prediction is by.
    """
    pairs = {
        "step time (s)": ("seconds_per_step", "seconds_per_step_predicted"),
        **{
            f"{level}-level imbalance": (
                f"imbalance_{level}_aggregate",
                f"imbalance_{level}_predicted_aggregate",
            )
            for level in ("pipeline", "data", "context")
        },
    }
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
