"""What is kept of every step, and the figures of a whole run.

Means alone hide the steps that everybody waits for, so every imbalance degree comes as mean, 99th
percentile and aggregate (the quotient of the sums over steps: N·Σmax/ΣW at the pipeline level).

Steps that leave the mesh are those of a *strategy*, by number (0: the mesh). The first steps on
each are slower, since its ranks connect and allocate then: each has a warm-up of its own.

Cost: 8 bytes × the :data:`COLUMNS` per step, about 20 MB for 100,000 steps.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import chain
from typing import NamedTuple

import numpy as np

from lightning_wlb.callbacks.imbalance import Imbalance, Level

LEVELS = (
    *Imbalance._fields,
    "pipeline_planned",
    "data_planned",
    *(f"{level}_predicted" for level in Imbalance._fields),
)
"""Imbalance degrees of a step: measured, from the plan's FLOPs, and by the cost model."""


class StepRecord(NamedTuple):
    """One step of the whole mesh, numbers only."""

    tokens: float  # new ones
    target_tokens: float
    delay_mean: float  # over the step's tokens, in steps
    delay_max: float  # over its pieces, in steps
    drain: float  # 1 if the step empties queues at the end of an epoch, else 0
    flops: float  # of the model, forward + backward
    seconds: float  # wall time from the start of the step to its end, on the slowest rank
    wait: float  # seconds until the loader handed the batch over, on the rank that waited longest
    seconds_predicted: float  # what the cost model gives for ``seconds``; NaN without a profile
    levels: tuple[Level, ...]  # one for each of LEVELS, in that order


COLUMNS = (
    "strategy",
    "timed",
    *StepRecord._fields[:-1],
    *(f"{level}_{part}" for level in LEVELS for part in Level._fields),
)
"""What is kept of a step: its strategy, whether it is beyond the warm-up, the numbers of its
record, and both sums of each level."""


class Records:
    """All steps of a run, compactly.

    Args:
        devices: ranks of the mesh.
        peak_flops: FLOP/s that one device can do at best; None if unknown.
        warm_up_steps: first steps on each strategy that the figures on measured time leave out.

    Attributes:
        timed: steps beyond them.
    """

    def __init__(
        self, devices: int, peak_flops: float | None = None, warm_up_steps: int = 0
    ) -> None:
        self.devices = devices
        self.peak_flops = peak_flops
        self.warm_up_steps = warm_up_steps
        self.timed = 0
        self._taken: Counter[int] = Counter()
        self._numbers = array("d")

    def __len__(self) -> int:
        return len(self._numbers) // len(COLUMNS)

    def add(self, record: StepRecord, strategy: int = 0) -> bool:
        """Keep a step; whether it is beyond the warm-up of its strategy."""
        assert len(record.levels) == len(LEVELS)
        timed = self._taken[strategy] >= self.warm_up_steps
        self._taken[strategy] += 1
        self.timed += timed
        levels = chain.from_iterable(record.levels)
        self._numbers.extend((strategy, timed, *record[:-1], *levels))
        return timed

    def columns(self) -> dict[str, np.ndarray]:
        """Each of :data:`COLUMNS` over all steps: float64 [steps]."""
        table = np.array(self._numbers).reshape(-1, len(COLUMNS))
        return dict(zip(COLUMNS, table.T, strict=True))

    def rates(self, tokens: float, flops: float, seconds: float) -> dict[str, float]:
        """Tokens/s and FLOP/s of one device; ``mfu`` only where the device's peak is known."""
        per_device = seconds * self.devices
        rates = {
            "tokens_per_second_per_device": _quotient(tokens, per_device),
            "tflops_per_device": _quotient(flops, per_device) / 1e12,
        }
        if self.peak_flops:
            rates["mfu"] = _quotient(flops, per_device * self.peak_flops)
        return rates

    def summary(self, strategy: int | None = None) -> dict[str, float]:
        """The run in plain numbers, as :meth:`.ImbalanceMonitor.summary` describes them.

        Args:
            strategy: whose steps alone are meant; None: all.
        """
        every = self.columns()
        if strategy is not None:
            own = every["strategy"] == strategy
            every = {name: column[own] for name, column in every.items()}
        timed = {name: column[every["timed"] > 0] for name, column in every.items()}
        drain = every["drain"] > 0
        seconds, tokens = float(timed["seconds"].sum()), float(timed["tokens"].sum())
        # Their medians stay where they are if single steps are slow, whatever the cause.
        per_token = timed["seconds"] / np.maximum(timed["tokens"], 1)
        flops_per_second = timed["flops"] / np.maximum(timed["seconds"], 1e-9)
        result: dict[str, float] = {
            "steps": len(every["seconds"]),
            "timed_steps": len(timed["seconds"]),
            "tokens": int(every["tokens"].sum()),
            "target_tokens": int(every["target_tokens"].sum()),
            "tokens_per_step": _mean(every["tokens"]),
            "seconds_per_step": _mean(timed["seconds"]),
            "seconds_per_step_p99": _p99(timed["seconds"]),
            "seconds_per_step_predicted": _mean(timed["seconds_predicted"]),
            "seconds_per_million_tokens": _quotient(seconds, tokens) * 1e6,
            "seconds_per_million_tokens_median": _median(per_token) * 1e6,
            "tflops_per_device_median": _median(flops_per_second) / self.devices / 1e12,
            **self.rates(tokens, float(timed["flops"].sum()), seconds),
            "loader_wait_seconds": _mean(timed["wait"]),
            "loader_wait_seconds_p99": _p99(timed["wait"]),
            "loader_wait_share": _quotient(timed["wait"].sum(), timed["wait"].sum() + seconds),
            "delay_mean": _mean(every["delay_mean"], every["tokens"]),
            "delay_max": float(every["delay_max"].max(initial=0.0)),
            "drain_steps": int(drain.sum()),
        }
        if drain.any():
            result["delay_mean_drain"] = _mean(every["delay_mean"][drain], every["tokens"][drain])
        for level in LEVELS:
            # A plan is as true in the first steps as later; only measurements warm up.
            columns = every if level.endswith("_planned") else timed
            peak, even = columns[f"{level}_peak"], columns[f"{level}_even"]
            worked = even > 0
            degrees = peak[worked] / even[worked]
            result[f"imbalance_{level}_mean"] = _mean(degrees)
            result[f"imbalance_{level}_p99"] = _p99(degrees)
            result[f"imbalance_{level}_aggregate"] = _quotient(peak.sum(), even.sum())
        return result


def _quotient(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator > 0 else float("nan")


def _mean(values: np.ndarray, weights: np.ndarray | None = None) -> float:
    if weights is None:
        weights = np.ones_like(values)
    return _quotient(float((values * weights).sum()), float(weights.sum()))


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def _p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99)) if len(values) else float("nan")
