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
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh_search.evaluate import evaluate, recomputed_share
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.plan import Recompute, piece_counts
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import StepPrediction

WORTH = 1.03
"""The least gain that is called one: what the simulation leaves out is a few percent."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """The predicted steps, at least one, of a packing under a sharding."""

    packing: str
    sharding: str
    steps: Sequence[StepPrediction]

    @property
    def total_ns(self) -> int:
        """The time of all steps."""
        return sum(step.total_ns for step in self.steps)

    @property
    def tokens(self) -> int:
        """The tokens of all steps."""
        return sum(step.plan.tokens for step in self.steps)

    @property
    def flops(self) -> int:
        """The model FLOPs of all steps."""
        return sum(step.flops for step in self.steps)

    @property
    def delay(self) -> float:
        """Steps that a token waits on average."""
        return sum(step.plan.delay * step.plan.tokens for step in self.steps) / self.tokens

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank holds in a step."""
        return max(step.peak_bytes for step in self.steps)

    def recomputed(self, *modes: Recompute) -> float:
        """The share of tokens whose micro-batches recompute in one of these ways."""
        return recomputed_share([step.plan for step in self.steps], *modes)

    @property
    def hidden(self) -> float:
        """The share of tensor-parallel messages' time in which products run; 0 without any."""
        waited, messages = (
            sum(each) for each in zip(*(s.waited_ns for s in self.steps), strict=True)
        )
        return 1 - waited / messages if messages else 0.0

    @property
    def tokens_per_second(self) -> float:
        """The speed over all steps."""
        return self.tokens * 1e9 / self.total_ns

    @property
    def idle(self) -> float:
        """The mean over steps of the share of the ranks' time in which they wait."""
        return float(np.mean([step.bubble for step in self.steps]))

    def typical_step(self, tokens: int) -> StepPrediction:
        """The step nearest to so many tokens first, and to the mean time per token and waiting."""
        pace, idle = self.total_ns / self.tokens, self.idle

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
        levels = [predicted_imbalance(step) for step in self.steps]
        times = np.array([step.total_ns for step in self.steps]) / 1e6
        tokens = np.array([step.plan.tokens for step in self.steps])
        first = self.steps[0]
        possible_flops = self.total_ns * first.devices * first.peak_flops
        return {
            "packing": self.packing,
            "sharding": self.sharding,
            "steps": len(self.steps),
            "tokens": self.tokens,
            "tokens_per_step": float(tokens.mean()),
            "tokens_per_step_spread": float(tokens.std() / tokens.mean()),
            **_imbalance("pipeline", [each.pipeline for each in levels]),
            **_imbalance("data", [each.data for each in levels]),
            **_imbalance("context", [each.context for each in levels]),
            "delay_mean": self.delay,
            "delay_max": max(step.plan.max_delay for step in self.steps),
            "idle": self.idle,
            "step_ms_mean": float(times.mean()),
            "step_ms_p99": float(np.percentile(times, 99)),
            "tokens_per_second": self.tokens_per_second,
            "model_flop_utilisation": self.flops * 1e9 / possible_flops,
            "peak_gigabytes": self.peak_bytes / 1e9,
            "recomputed_selective": self.recomputed("selective"),
            "recomputed_full": self.recomputed("full"),
            "recomputed": self.recomputed("selective", "full"),
            "hidden_messages": self.hidden,
            "speedup_per_token": (baseline.total_ns / baseline.tokens)
            / (self.total_ns / self.tokens),
            "speedup_per_flop": (baseline.total_ns / baseline.flops) / (self.total_ns / self.flops),
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
        raise ValueError(
            f"The model does not fit on the mesh {request.mesh}: parameters, gradients and"
            f" optimizer state take {state / 1e9:.1f} GB of a device, and"
            f" {_usable(predictor)} may be filled. {_remedy(request)}"
        )
    made = [
        Forecast(each.data.packing_choice.method, each.sharding, evaluate(each, each.mesh).steps)
        for each in requests
    ]
    fit = [forecast for forecast in made if forecast.peak_bytes <= predictor.usable_bytes]
    if fit:
        return Comparison(request, fit, [forecast for forecast in made if forecast not in fit])
    least = min(made, key=lambda forecast: forecast.peak_bytes)
    asked = request.activation_checkpointing
    other = "" if asked == "auto" else " --activation-checkpointing auto may; or else: "
    raise ValueError(
        f"The activations do not fit on the mesh {request.mesh}: with activation checkpointing"
        f" {asked!r}, packing {least.packing!r} with sharding {least.sharding!r}"
        f" would fill {least.peak_bytes / 1e9:.1f} GB of a device, of which"
        f" {_usable(predictor)} may be filled.{other} {_remedy(request)}"
    )


def _usable(predictor: Predictor) -> str:
    usable, profile = predictor.usable_bytes, predictor.latency.profile
    percent = 100 * usable / profile.memory_bytes
    return f"{usable / 1e9:.3g} GB ({percent:.0f} % of {profile.device})"


def _remedy(request: MeshRequest) -> str:
    return (
        f"--mesh auto --devices {request.devices} --micro-batches {request.data.micro_batches}"
        " finds a mesh that holds it, or says how many devices it takes."
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
    """How fast a packing is under a sharding on a mesh."""

    packing: str
    sharding: str
    mesh: str
    tokens_per_second: float
    flops_per_second: float  # of the model
    delay: float = 0.0  # steps that a token waits on average


@dataclass(frozen=True)
class Verdict:
    """Advice in words: what balancing gains over cutting and concatenating, and over ``best_fit``.

    Args:
        profile: by which all is simulated.
        attention: attention's part of the documents' FLOPs.
        chosen: a packing that keeps documents whole.
        original: cutting and concatenating at its fastest; None where that fits on no mesh.
        reference: ``best_fit`` at its fastest; None likewise.
        searched: whether each is on its own best mesh; else all are on one.
    """

    profile: Profile
    attention: float
    chosen: Speed
    original: Speed | None
    reference: Speed | None
    searched: bool = False

    @property
    def gain(self) -> float:
        """Tokens per second of the chosen one over those of ``best_fit``."""
        if self.reference is None:
            return math.inf
        return self.chosen.tokens_per_second / self.reference.tokens_per_second

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
        mine, its = self.chosen, self.original
        return {
            "packing": self.advised.packing,
            "sharding": self.advised.sharding,
            "mesh": self.advised.mesh,
            "worth_it": self.worth_it,
            "times_original": its and mine.tokens_per_second / its.tokens_per_second,
            "times_original_for_equal_work": its and mine.flops_per_second / its.flops_per_second,
            "times_best_fit": self.gain if self.reference else None,
            "attention_share": self.attention,
            "text": self.lines,
        }

    @property
    def lines(self) -> list[str]:
        """The words, each a line."""
        accuracy, chosen, advised = self.profile.accuracy, self.chosen, self.advised
        named = accuracy and f", {accuracy}"
        take = f"Take packing {advised.packing} with sharding {advised.sharding}"
        take += f" on mesh {advised.mesh}."
        if not self.worth_it and chosen.packing != REFERENCE:
            take = (
                f"Balancing is not for you: {WORTH - 1:.0%} more tokens/s than {REFERENCE} are"
                f" asked of {chosen.packing}. {take}"
            )
        delay = f"{chosen.delay:.2f}"
        waits = f"; tokens wait {delay} steps on average" if float(delay) else ""
        here = (
            "" if self.searched else " All on this mesh: --mesh auto gives each its own best one."
        )
        return [
            f"Verdict, simulated with profile {self.profile.name}{named}:",
            take,
            *self._comparisons(),
            f"Attention is {self.attention:.0%} of these documents' model FLOPs{waits}.{here}",
        ]

    def _comparisons(self) -> Iterator[str]:
        """The chosen packing beside what people do today, and beside packing by tokens."""
        mine = self.chosen
        for packing, other in ((BASELINE, self.original), (REFERENCE, self.reference)):
            how = f"{PRACTICE[packing]} ({packing})"
            if other is None:
                yield f"Beside {how}: that fits in memory on no mesh of these devices."
            elif mine.packing != packing:
                where = f" on its own best mesh, {other.mesh}" if self.searched else ""
                equal = _times(mine.flops_per_second / other.flops_per_second)
                for_work = f", {equal} times for equal work, and cuts no document"
                tokens = _times(mine.tokens_per_second / other.tokens_per_second)
                yield (
                    f"Beside {how}{where}: {mine.packing} has {tokens} times its tokens/s"
                    f" ({mine.tokens_per_second:,.0f} to {other.tokens_per_second:,.0f})"
                    f"{for_work * (packing == BASELINE)}."
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
    mesh = ",".join(map(str, request.mesh.shape))

    def fastest(found: Sequence[Forecast]) -> Speed | None:
        best = max(found, key=lambda row: row.tokens_per_second, default=None)
        if best is None:
            return None
        per_second = best.tokens_per_second, best.flops * 1e9 / best.total_ns
        return Speed(best.packing, best.sharding, mesh, *per_second, best.delay)

    def of(packing: str, among: Sequence[Forecast] = rows) -> Speed | None:
        return fastest([row for row in among if row.packing == packing])

    # If no row of a reference fits in memory, its speed is still what to compare with.
    original, reference = (
        of(name) or of(name, comparison.too_large) for name in (BASELINE, REFERENCE)
    )
    usual = of(str(DataSettings.packing))
    chosen = fastest([row for row in rows if not PACKINGS[row.packing].cuts_stream]) or reference
    assert chosen is not None
    if usual is not None and chosen.tokens_per_second < WORTH * usual.tokens_per_second:
        chosen = usual
    return Verdict(request.profile, attention_of(request), chosen, original, reference)


def attention_of(request: MeshRequest) -> float:
    """Attention's part of the forward FLOPs of all documents, cut at the window."""
    shape = request.shape
    pieces = piece_counts(request.lengths, request.data.context_window)
    attention = sum(count * attention_flops(shape, n) for n, count in pieces.items())
    linear = sum(count * linear_flops(shape, n) for n, count in pieces.items())
    return attention / (attention + linear)
