"""The steps of a run by their strategy: how often each was taken, and what its pipelines computed.

A strategy goes by its number: 0 is the mesh, i the i-th of ``WLBStrategy.dynamic``. Of a pipeline
the seconds are kept that one of its ranks computes in a step, its stages taken as even: what a
strategy balances. Waiting for neighbours and for parameters is in the step's time alone.

Cost: a sum for each pipeline of each strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_wlb.callbacks.imbalance import Timings, micro_batch_seconds
from lightning_wlb.callbacks.run_summary import Records
from lightning_wlb.plan import Schemes
from lightning_wlb.prediction.step import StepPrediction


class ByStrategy:
    """Collects what the pipelines of every strategy compute.

    Args:
        strategies: the mesh's own pipelines, and those of every other strategy.
    """

    def __init__(self, strategies: Sequence[Schemes]) -> None:
        self.strategies = tuple(strategies)
        # Seconds, predicted seconds and micro-batches of each pipeline, summed over steps.
        self._sums = [np.zeros((3, len(each))) for each in strategies]

    def number(self, strategy: Schemes) -> int:
        """Of a plan's strategy."""
        return self.strategies.index(strategy, 1) if strategy else 0

    def add(
        self,
        number: int,
        timings: Timings,
        counts: Sequence[int],
        predicted: StepPrediction | None,
    ) -> None:
        """Take in a step: timings and micro-batches of its pipelines, and their prediction."""
        stages = np.array([len(scheme.stages) for scheme in self.strategies[number]])
        expected = np.nan if predicted is None else predicted.work_ns.sum(axis=1) / 1e9 / stages
        self._sums[number][0] += micro_batch_seconds(timings).sum(axis=1) / stages
        self._sums[number][1] += expected
        self._sums[number][2] += counts

    def report(self, records: Records) -> list[dict[str, Any]]:
        """The strategies that were taken, as :meth:`.ImbalanceMonitor.strategies` has them."""
        found = []
        for number, (strategy, sums) in enumerate(zip(self.strategies, self._sums, strict=True)):
            summary = records.summary(number)
            if not summary["steps"]:
                continue
            means = sums / (summary["timed_steps"] or np.nan)
            pipelines = [
                {
                    "ranks": [scheme.first, scheme.ranks.stop - 1],
                    "pipeline": len(scheme.stages),
                    "context": scheme.context,
                    "tensor": scheme.tensor,
                    "compute_seconds": seconds,
                    "compute_seconds_predicted": predicted,
                    "micro_batches": micro_batches,
                }
                for scheme, (seconds, predicted, micro_batches) in zip(
                    strategy, means.T.tolist(), strict=True
                )
            ]
            found.append({"strategy": number, **summary, "pipelines": pipelines})
        return found
