"""Many predicted steps of one packing as one row of a comparison.

Figures over steps are given as mean, 99th percentile and *aggregate*, the quotient of the sums
over all steps: steps differ in tokens, so a mean of quotients misleads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_wlb.callbacks.imbalance import Level, data_level, pipeline_level, slots
from lightning_wlb.plan import StepPlan
from lightning_wlb.planning import Planner
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import StepPrediction


def plan_steps(planner: Planner, steps: int) -> list[StepPlan]:
    """The next ``steps`` plans of a run; a new epoch begins where one ends."""
    plans: list[StepPlan] = []
    while len(plans) < steps:
        plan = planner.next_step()
        if plan is not None:
            plans.append(plan)
    return plans


@dataclass(frozen=True, eq=False)
class Forecast:
    """Predicted steps of one packing under one sharding.

    Args:
        packing: name of the packing.
        sharding: name of the sharding.
        steps: at least one prediction.
    """

    packing: str
    sharding: str
    steps: Sequence[StepPrediction]

    @staticmethod
    def of(
        packing: str, sharding: str, plans: Iterable[StepPlan], predictor: Predictor
    ) -> Forecast:
        """Predict plans."""
        return Forecast(packing, sharding, [predictor.predict(plan) for plan in plans])

    @property
    def total_ns(self) -> int:
        """Time of all steps."""
        return sum(step.total_ns for step in self.steps)

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return sum(step.plan.tokens for step in self.steps)

    @property
    def flops(self) -> int:
        """Model FLOPs of all steps."""
        return sum(step.flops for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank in the fullest step."""
        return max(step.peak_bytes for step in self.steps)

    @property
    def typical_step(self) -> StepPrediction:
        """The step nearest to the mean in both its time and its work."""
        time, flops = self.total_ns / len(self.steps), self.flops / len(self.steps)
        return min(
            self.steps,
            key=lambda step: abs(step.total_ns / time - 1) + abs(step.flops / flops - 1),
        )

    def summary(self, baseline: Forecast) -> dict[str, Any]:
        """Plain numbers; speed-ups are over ``baseline``, per token and per model FLOP.

        The two differ where the packings cut documents differently: a document that is cut at a
        window's end costs less attention.
        """
        pipeline = [
            pipeline_level(step.work_ns.astype(np.float64), slots(step.plan)) for step in self.steps
        ]
        data = [data_level(step.work_ns.astype(np.float64)) for step in self.steps]
        context = [Level(*step.context_ns) for step in self.steps]
        times = np.array([step.total_ns for step in self.steps]) / 1e6
        tokens = np.array([step.plan.tokens for step in self.steps])
        delays = np.array([step.plan.delay for step in self.steps])
        first = self.steps[0]
        return {
            "packing": self.packing,
            "sharding": self.sharding,
            "steps": len(self.steps),
            "tokens": self.tokens,
            "tokens_per_step": float(tokens.mean()),
            **_level("imbalance_pipeline", pipeline),
            **_level("imbalance_data", data),
            **_level("imbalance_context", context),
            "delay_mean": float((delays * tokens).sum() / tokens.sum()),
            "delay_max": max(step.plan.max_delay for step in self.steps),
            "bubble": float(np.mean([step.bubble for step in self.steps])),
            "step_ms_mean": float(times.mean()),
            "step_ms_p99": float(np.percentile(times, 99)),
            "tokens_per_second": self.tokens * 1e9 / self.total_ns,
            "model_flop_utilisation": self.flops
            * 1e9
            / (self.total_ns * first.devices * first.peak_flops),
            "peak_gigabytes": self.peak_bytes / 1e9,
            "speedup_per_token": _ratio(baseline, self, "tokens"),
            "speedup_per_flop": _ratio(baseline, self, "flops"),
        }


def _ratio(baseline: Forecast, other: Forecast, unit: str) -> float:
    """Time per unit of the baseline over that of the other."""
    return (baseline.total_ns / getattr(baseline, unit)) / (other.total_ns / getattr(other, unit))


def _level(name: str, levels: Sequence[Level]) -> dict[str, float]:
    degrees = [level.degree for level in levels]
    return {
        f"{name}_mean": float(np.nanmean(degrees)),
        f"{name}_p99": float(np.nanpercentile(degrees, 99)),
        f"{name}_aggregate": sum(level.peak for level in levels)
        / sum(level.even for level in levels),
    }
