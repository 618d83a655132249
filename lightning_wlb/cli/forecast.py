"""What `lightning-wlb plan` finds: predicted steps of every candidate, and a verdict in words.

A candidate is a packing under a sharding. Figures over steps are given as mean, 99th percentile and
*aggregate*, the quotient of the sums over all steps: steps differ in tokens, so a mean of quotients
misleads.

The verdict is on a packing that keeps documents whole. It compares with what people do today,
cutting and concatenating (``original``), per token and for equal work, since a cut saves attention;
and with ``best_fit``, which packs whole documents by their tokens: a gain below :data:`WORTH` over
that is said to be none.

Cost: planning and predicting every step of every candidate; `auto` plans slowest, as it simulates
several plans a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lightning_wlb.callbacks.imbalance import Level, predicted_imbalance
from lightning_wlb.cli.request import BASELINE, PRACTICE, REFERENCE
from lightning_wlb.cost.flops import attention_flops, linear_flops
from lightning_wlb.mesh_search.evaluate import MeshRow, evaluate, name_of, recomputed_share
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.plan import piece_counts
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import StepPrediction

WORTH = 1.03
"""The least gain that is called one: what the simulation leaves out is a few percent."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """The predicted steps of a packing under a sharding, and their figures together."""

    packing: str
    sharding: str
    row: MeshRow
    steps: Sequence[StepPrediction]

    @property
    def delay(self) -> float:
        """Steps that a token waits on average."""
        held = sum(step.plan.delay * step.plan.tokens for step in self.steps)
        return held / self.row.tokens

    @property
    def hidden(self) -> float:
        """The share of tensor-parallel messages' time in which products run; 0 without any."""
        waited, messages = (
            sum(each) for each in zip(*(s.waited_ns for s in self.steps), strict=True)
        )
        return 1 - waited / messages if messages else 0.0

    @property
    def idle(self) -> float:
        """The mean over steps of the share of the ranks' time in which they wait."""
        return float(np.mean([step.bubble for step in self.steps]))

    def typical_step(self, tokens: int) -> StepPrediction:
        """The step nearest to so many tokens first, and to the mean time per token and waiting."""
        pace, idle = self.row.steps_ns / self.row.tokens, self.idle

        def distance(step: StepPrediction) -> float:
            own = step.plan.tokens
            paced = abs(step.total_ns / own / pace - 1)
            return 5 * abs(own / tokens - 1) + paced + abs(step.bubble - idle)

        return min(self.steps, key=distance)

    def summary(self, baseline: Forecast) -> dict[str, Any]:
        """Plain numbers; speed-ups are over ``baseline``, per token and per model FLOP.

        The two differ if the packings cut documents differently: a document that is cut at a
        window's end costs less attention.
        """
        row, base, first = self.row, baseline.row, self.steps[0]
        plans = [step.plan for step in self.steps]
        levels = [predicted_imbalance(step) for step in self.steps]
        times = np.array([step.total_ns for step in self.steps]) / 1e6
        tokens = np.array([plan.tokens for plan in plans])
        return {
            "packing": self.packing,
            "sharding": self.sharding,
            "steps": row.steps,
            "tokens": row.tokens,
            "tokens_per_step": float(tokens.mean()),
            "tokens_per_step_spread": float(tokens.std() / tokens.mean()),
            **_imbalance("pipeline", [each.pipeline for each in levels]),
            **_imbalance("data", [each.data for each in levels]),
            **_imbalance("context", [each.context for each in levels]),
            "delay_mean": self.delay,
            "delay_max": max(plan.max_delay for plan in plans),
            "idle": self.idle,
            "step_ms_mean": float(times.mean()),
            "step_ms_p99": float(np.percentile(times, 99)),
            "tokens_per_second": row.tokens_per_second,
            "model_flop_utilisation": row.flops_per_second / first.devices / first.peak_flops,
            "peak_gigabytes": row.peak_bytes / 1e9,
            "recomputed_selective": recomputed_share(plans, "selective"),
            "recomputed_full": recomputed_share(plans, "full"),
            "recomputed": row.recomputed,
            "hidden_messages": self.hidden,
            "speedup_per_token": row.tokens_per_second / base.tokens_per_second,
            "speedup_per_flop": base.times(row),
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """The candidates that were planned on a mesh; ``request`` is the baseline's."""

    request: MeshRequest
    forecasts: Sequence[Forecast]  # of candidates that fit in memory, the baseline first if it does
    too_large: Sequence[Forecast]  # of those that do not fit

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The figures of each candidate that fits; speed-ups are over the first."""
        return [forecast.summary(self.forecasts[0]) for forecast in self.forecasts]


def compare(requests: Sequence[MeshRequest]) -> Comparison:
    """Plan and predict every candidate.

    Args:
        requests: one for each candidate, with the sizes of one mesh; the baseline first.

    Raises:
        ValueError: nothing fits in memory; the message says what would.
    """
    request = requests[0]
    predictor = request.predictor(request.mesh)
    state = max(predictor.memory.state_bytes)
    if state > predictor.usable_bytes:
        raise _too_large(predictor, request, "model", "its state", state)
    fit: list[Forecast] = []
    too_large: list[Forecast] = []
    for each in requests:
        found = evaluate(each, each.mesh)
        packing = each.data.packing_choice.method
        made = Forecast(packing, each.sharding, found.row, found.steps)
        (fit if found.fits else too_large).append(made)
    if fit:
        return Comparison(request, fit, too_large)
    least = min(too_large, key=lambda forecast: forecast.row.peak_bytes)
    raise _too_large(
        predictor,
        request,
        f"run with packing {least.packing}",
        "all that it holds",
        least.row.peak_bytes,
    )


def _too_large(
    predictor: Predictor, request: MeshRequest, what: str, held: str, size: int
) -> ValueError:
    usable, profile = predictor.usable_bytes, predictor.latency.profile
    return ValueError(
        f"The {what} does not fit on the mesh {request.mesh} with activation checkpointing"
        f" {request.activation_checkpointing!r}: {held} would fill {size / 1e9:.3g} GB of a device,"
        f" of which {usable / 1e9:.3g} GB ({100 * usable / profile.memory_bytes:.0f} % of"
        f" {profile.device}) may be filled. --mesh auto --devices {request.devices} --micro-batches"
        f" {request.data.micro_batches} finds a mesh that holds it, or says how many devices it"
        " takes."
    )


def _imbalance(level: str, steps: Sequence[Level]) -> dict[str, float]:
    degrees = [step.degree for step in steps]
    return {
        f"imbalance_{level}_mean": float(np.nanmean(degrees)),
        f"imbalance_{level}_p99": float(np.nanpercentile(degrees, 99)),
        f"imbalance_{level}_aggregate": sum(step.peak for step in steps)
        / sum(step.even for step in steps),
    }


class Speed(NamedTuple):
    """A packing under a sharding, on a mesh."""

    packing: str
    sharding: str
    row: MeshRow
    delay: float = 0.0  # steps that a token waits on average

    def over(self, other: Speed) -> float:
        """Its tokens per second over those of another one."""
        return self.row.tokens_per_second / other.row.tokens_per_second

    def over_per_flop(self, other: Speed) -> float:
        """How many times as fast as another one it is for equal work."""
        return other.row.times(self.row)


@dataclass(frozen=True)
class Verdict:
    """Advice in words: what balancing gains over cutting and concatenating, and over ``best_fit``.

    Args:
        request: what was asked; all is simulated by its profile.
        chosen: a packing that keeps documents whole.
        original: cutting and concatenating at its fastest; None where that fits on no mesh.
        reference: ``best_fit`` at its fastest; None likewise.
        searched: whether each is on its own best mesh; else all are on one.
    """

    request: MeshRequest
    chosen: Speed
    original: Speed | None
    reference: Speed | None
    searched: bool = False

    @cached_property
    def attention(self) -> float:
        """Attention's part of the forward FLOPs of all documents, cut at the window."""
        shape = self.request.shape
        pieces = piece_counts(self.request.lengths, self.request.data.context_window)
        attention = sum(count * attention_flops(shape, n) for n, count in pieces.items())
        linear = sum(count * linear_flops(shape, n) for n, count in pieces.items())
        return attention / (attention + linear)

    @property
    def gain(self) -> float:
        """Tokens per second of the chosen one over those of ``best_fit``."""
        return math.inf if self.reference is None else self.chosen.over(self.reference)

    @property
    def worth_it(self) -> bool:
        """Whether the gain is at least :data:`WORTH`."""
        return self.gain >= WORTH

    @property
    def advised(self) -> Speed:
        """What to take."""
        return self.chosen if self.worth_it or self.reference is None else self.reference

    @property
    def figures(self) -> dict[str, Any]:
        """Plain numbers, and the words."""
        mine, cut = self.chosen, self.original
        return {
            "packing": self.advised.packing,
            "sharding": self.advised.sharding,
            "mesh": self.advised.row.sizes,
            "worth_it": self.worth_it,
            "times_original": cut and mine.over(cut),
            "times_original_for_equal_work": cut and mine.over_per_flop(cut),
            "times_best_fit": self.gain if self.reference else None,
            "attention_share": self.attention,
            "text": self.lines,
        }

    @property
    def lines(self) -> list[str]:
        """The words, each a line."""
        profile, shape = self.request.profile, self.request.shape
        accuracy, chosen, advised = profile.accuracy, self.chosen, self.advised
        named = accuracy and f", {accuracy}"
        take = f"Take packing {advised.packing} with sharding {advised.sharding}"
        take += f" on mesh {name_of(advised.row.mesh)}."
        if not self.worth_it and chosen.packing != REFERENCE:
            take = (
                f"Balancing is not for you: {WORTH - 1:.0%} more tokens/s than {REFERENCE} are"
                f" asked of {chosen.packing}. {take}"
            )
        delay = f"{chosen.delay:.2f}"
        waits = f"; tokens wait {delay} steps on average" if float(delay) else ""
        without = sum(not layer.attends for layer in shape.each_layer)
        few = f", as {without} of {shape.layers} layers do not attend" * (without > 0)
        here = (
            "" if self.searched else " All on this mesh: --mesh auto gives each its own best one."
        )
        return [
            f"Verdict, simulated with profile {profile.name}{named}:",
            take,
            *self._comparisons(),
            f"Attention is {self.attention:.0%} of these documents' model FLOPs{few}{waits}.{here}",
        ]

    def _comparisons(self) -> Iterator[str]:
        """The chosen packing beside what people do today, and beside packing by tokens."""
        mine = self.chosen
        for packing, other in ((BASELINE, self.original), (REFERENCE, self.reference)):
            how = f"{PRACTICE[packing]} ({packing})"
            if other is None:
                yield f"Beside {how}: that fits in memory on no mesh of these devices."
            elif mine.packing != packing:
                where = f" on its own best mesh, {name_of(other.row.mesh)}" * self.searched
                speeds = f"{mine.row.tokens_per_second:,.0f} to {other.row.tokens_per_second:,.0f}"
                equal = _times(mine.over_per_flop(other))
                for_work = f", {equal} times for equal work, and cuts no document"
                yield (
                    f"Beside {how}{where}: {mine.packing} has {_times(mine.over(other))} times its"
                    f" tokens/s ({speeds}){for_work * (packing == BASELINE)}."
                )


def _times(quotient: float) -> str:
    """Cut off, so that less than :data:`WORTH` is never printed as that."""
    return f"{math.floor(quotient * 100) / 100:.2f}"


def judged(comparison: Comparison) -> Verdict:
    """The verdict on a comparison.

    Of the packings that keep documents whole it is on the one that trains by default, unless
    another one is worth more. So a mesh that is given has the verdict that a search had for it.
    """
    request, rows = comparison.request, comparison.forecasts

    def fastest(found: Sequence[Forecast]) -> Speed | None:
        best = max(found, key=lambda each: each.row.tokens_per_second, default=None)
        if best is None:
            return None
        return Speed(best.packing, best.sharding, best.row, best.delay)

    def of(packing: str, among: Sequence[Forecast] = rows) -> Speed | None:
        return fastest([row for row in among if row.packing == packing])

    # If no row of a reference fits in memory, its speed is still what to compare with.
    original, reference = (
        of(name) or of(name, comparison.too_large) for name in (BASELINE, REFERENCE)
    )
    usual = of(str(DataSettings.packing))
    chosen = fastest([row for row in rows if not PACKINGS[row.packing].cuts_stream]) or reference
    assert chosen is not None
    if usual is not None and chosen.over(usual) < WORTH:
        chosen = usual
    return Verdict(request, chosen, original, reference)
