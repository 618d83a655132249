"""The figures of a whole run, from numbers kept for every step, and the tables that show them.

Means alone hide the steps that everybody waits for, so every imbalance degree comes as mean, 99th
percentile and aggregate (the quotient of the sums over steps: N·Σmax/ΣW at the pipeline level).

Every step belongs to a *strategy*, by number: 0 is the mesh, other numbers are the heterogeneous
pipelines that steps may run on instead. The first steps on each strategy are slower, since its
ranks connect and allocate then, so each strategy has a warm-up of its own.

Cost: 8 bytes × the :data:`COLUMNS` per step, about 20 MB for 100,000 steps.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from lightning_wlb.callbacks.imbalance import Imbalance, Level
from lightning_wlb.mesh import AXES

LEVELS = (
    *Imbalance._fields,
    "pipeline_planned",
    "data_planned",
    *(f"{level}_predicted" for level in Imbalance._fields),
)
"""A step's imbalance degrees: measured, from the plan's FLOPs, and by the cost model."""


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
"""The numbers kept of a step: its strategy, 1 if it is beyond the warm-up, the fields of its
record, and the peak and even work of each level."""


@dataclass(eq=False)
class Records:
    """All steps of a run."""

    devices: int
    peak_flops: float | None = None  #: FLOP/s that one device can do at best; None if unknown
    warm_up_steps: int = 0  #: how many first steps on each strategy do not enter measured figures

    def __post_init__(self) -> None:
        self._taken: Counter[int] = Counter()
        self._numbers = array("d")

    def __len__(self) -> int:
        return len(self._numbers) // len(COLUMNS)

    def add(self, record: StepRecord, strategy: int = 0) -> bool:
        """Keep a step, and return whether it is beyond the warm-up of its strategy."""
        assert len(record.levels) == len(LEVELS)
        timed = self._taken[strategy] >= self.warm_up_steps
        self._taken[strategy] += 1
        levels = chain.from_iterable(record.levels)
        self._numbers.extend((strategy, timed, *record[:-1], *levels))
        return timed

    def columns(self) -> dict[str, np.ndarray]:
        """Each of :data:`COLUMNS` over all steps: float64 [steps]."""
        table = np.array(self._numbers).reshape(-1, len(COLUMNS))
        return dict(zip(COLUMNS, table.T, strict=True))

    def rates(self, tokens: float, flops: float, seconds: float) -> dict[str, float]:
        """Tokens/s and TFLOP/s of one device; ``mfu`` only if the device's peak is known."""
        per_device = seconds * self.devices
        rates = {
            "tokens_per_second_per_device": _quotient(tokens, per_device),
            "tflops_per_device": _quotient(flops, per_device) / 1e12,
        }
        if self.peak_flops:
            rates["mfu"] = _quotient(flops, per_device * self.peak_flops)
        return rates

    def summary(self, strategy: int | None = None) -> dict[str, float]:
        """The figures that :meth:`.ImbalanceMonitor.summary` describes, for one strategy or all."""
        every = self.columns()
        if strategy is not None:
            own = every["strategy"] == strategy
            every = {name: column[own] for name, column in every.items()}
        timed = {name: column[every["timed"] > 0] for name, column in every.items()}
        drain = every["drain"] > 0
        seconds, tokens = float(timed["seconds"].sum()), float(timed["tokens"].sum())
        # Medians over steps do not move if single steps are slow, whatever the cause.
        per_token = timed["seconds"] / np.maximum(timed["tokens"], 1)
        flops_per_second = timed["flops"] / np.maximum(timed["seconds"], 1e-9)
        result: dict[str, float] = {
            "steps": len(every["seconds"]),
            "timed_steps": len(timed["seconds"]),
            "tokens": int(every["tokens"].sum()),
            "target_tokens": int(every["target_tokens"].sum()),
            "tokens_per_step": _mean(every["tokens"]),
            "tokens_per_step_spread": _quotient(every["tokens"].std(), every["tokens"].mean()),
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
            # Only measurements need a warm-up: a plan's figures hold from the first step on.
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


def ranks_in_words(sizes: Mapping[str, int]) -> str:
    """``data 2 × context 4``: the axes that have more than one rank."""
    several = [f"{axis} {sizes[axis]}" for axis in AXES if sizes.get(axis, 1) > 1]
    return " × ".join(several) or "one device"


def new_table(title: str, caption: str, headings: Sequence[str], words: int = 0) -> Table:
    """An empty table of figures, aligned right; column ``words`` has texts, aligned left."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == words else "right")
    return table


def strategies_table(strategies: Sequence[Mapping[str, Any]]) -> Table:
    """:meth:`.ImbalanceMonitor.strategies` as a table, a row for each strategy."""
    caption = "Means over the steps of each strategy, its warm-up left out."
    headings = ("", "steps", "time (s)", "predicted", "imbalance, data")
    table = new_table("Steps by strategy", caption, headings)
    shown = "seconds_per_step", "seconds_per_step_predicted", "imbalance_data_aggregate"
    for each in strategies:
        name = f"strategy {each['strategy']}" if each["strategy"] else "mesh"
        table.add_row(name, str(each["steps"]), *(_shown(each[figure]) for figure in shown))
    return table


def summary_table(summary: dict[str, float], sizes: Mapping[str, int]) -> Table:
    """:meth:`.ImbalanceMonitor.summary` as a table.

    Args:
        summary: the figures. Those that are not a number are left out.
        sizes: of the mesh's axes, for the title. Levels of axes of one rank are left out.
    """
    measured = f"measured over {summary['timed_steps']} of them, warm-up left out."
    if not summary["timed_steps"]:
        measured = "all of them warm-up, so that no time is shown."
    table = new_table(
        f"Imbalance and throughput, {ranks_in_words(sizes)}",
        f"{summary['steps']} steps, {summary['tokens']:,} tokens; {measured}"
        " Imbalance degree: 1 = balanced; aggregate: sums over all steps.",
        ("", "mean", "p99", "aggregate"),
    )
    levels = [level for level in Imbalance._fields if sizes[level] > 1]
    for rows in (_imbalance(summary, levels), _throughput(summary), _delay(summary)):
        for name, *figures in rows:
            shown = [figure for figure in figures if figure]
            if shown and shown != ["–"] * len(shown):
                table.add_row(name, *figures)
        table.add_section()
    return table


def _imbalance(summary: dict[str, float], levels: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for level in levels:
        for suffix, name in (
            ("", f"imbalance, {level} level"),
            ("_planned", "  as planned (FLOPs)"),
            ("_predicted", "  as predicted (profile)"),
        ):
            figures = [
                summary.get(f"imbalance_{level}{suffix}_{how}", math.nan)
                for how in ("mean", "p99", "aggregate")
            ]
            if suffix and math.isnan(summary.get(f"imbalance_{level}_mean", math.nan)):
                name = f"imbalance, {level} level,{name[1:]}"
            yield name, *map(_shown, figures)


def _throughput(summary: dict[str, float]) -> Iterator[tuple[str, ...]]:
    yield (
        "step time (s)",
        _shown(summary["seconds_per_step"]),
        _shown(summary["seconds_per_step_p99"]),
    )
    yield "  as predicted (profile)", _shown(summary["seconds_per_step_predicted"])
    yield (
        "wait for the loader (s)",
        _shown(summary["loader_wait_seconds"]),
        _shown(summary["loader_wait_seconds_p99"]),
        _shown(summary["loader_wait_share"], "{:.1%}"),
    )
    yield "time per million tokens (s)", "", "", _shown(summary["seconds_per_million_tokens"])
    spread = f"± {summary['tokens_per_step_spread']:.1%}"
    yield "tokens per step", f"{summary['tokens_per_step']:,.0f}", spread
    yield "tokens/s per device", "", "", _shown(summary["tokens_per_second_per_device"], "{:,.0f}")
    yield "model TFLOP/s per device", "", "", _shown(summary["tflops_per_device"], "{:.3g}")
    if "mfu" in summary:
        yield "model FLOP utilisation", "", "", _shown(summary["mfu"], "{:.1%}")


def _delay(summary: dict[str, float]) -> Iterator[tuple[str, ...]]:
    if not summary["delay_max"]:
        return
    yield "delay (steps)", _shown(summary["delay_mean"]), f"max {summary['delay_max']:.0f}"
    if summary["drain_steps"]:
        name = f"  in the {summary['drain_steps']} drain steps"
        yield name, _shown(summary["delay_mean_drain"])


def _shown(value: float, form: str = "{:.3f}") -> str:
    return "–" if math.isnan(value) else form.format(value)
