"""What `lightning-wlb plan` finds: predicted steps of every candidate, and a verdict in words.

A candidate is a packing under a sharding. Figures over steps are given as mean, 99th percentile and
*aggregate*, the quotient of the sums over all steps: steps differ in tokens, so a mean of quotients
misleads.

The verdict advises the candidate with most tokens per second that keeps documents whole. Its gain
is over ``best_fit``, which packs whole documents by their tokens; below :data:`WORTH` it is said to
be none.

Cost: planning and predicting every step of every candidate; `auto` plans slowest, as it simulates
several plans a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lightning_wlb.callbacks.imbalance import Level, predicted_imbalance
from lightning_wlb.cli.request import REFERENCE, Request
from lightning_wlb.cli.shared_options import Lengths
from lightning_wlb.cost.flops import attention_flops, linear_flops
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Recompute
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.planner import plan_steps
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
        """The fraction of tokens whose micro-batches recompute in one of these ways."""
        replicas = (replica for step in self.steps for replica in step.plan.replicas)
        tokens = (
            replica.tokens_of(each) / len(each.replicas)
            for replica in replicas
            for each in replica.forward
            if each.recompute in modes
        )
        return sum(tokens) / self.tokens

    @property
    def tokens_per_second(self) -> float:
        """The speed over all steps."""
        return self.tokens * 1e9 / self.total_ns

    @property
    def typical_step(self) -> StepPrediction:
        """The step nearest to the mean in both its time and its work."""
        time, flops = self.total_ns / len(self.steps), self.flops / len(self.steps)

        def distance(step: StepPrediction) -> float:
            return abs(step.total_ns / time - 1) + abs(step.flops / flops - 1)

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
            "bubble": float(np.mean([step.bubble for step in self.steps])),
            "step_ms_mean": float(times.mean()),
            "step_ms_p99": float(np.percentile(times, 99)),
            "tokens_per_second": self.tokens_per_second,
            "model_flop_utilisation": self.flops * 1e9 / possible_flops,
            "peak_gigabytes": self.peak_bytes / 1e9,
            "recomputed_selective": self.recomputed("selective"),
            "recomputed_full": self.recomputed("full"),
            "recomputed": self.recomputed("selective", "full"),
            "speedup_per_token": (baseline.total_ns / baseline.tokens)
            / (self.total_ns / self.tokens),
            "speedup_per_flop": (baseline.total_ns / baseline.flops) / (self.total_ns / self.flops),
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """The candidates of a request."""

    request: Request
    forecasts: Sequence[Forecast]  # of candidates that fit in memory, the baseline first if it does
    too_large: Sequence[Forecast]  # of those that do not fit

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The figures of each candidate that fits; speed-ups are over the first."""
        return [forecast.summary(self.forecasts[0]) for forecast in self.forecasts]

    @property
    def longest_micro_batch(self) -> int:
        """Tokens of the longest micro-batch that fits in memory if all are as long."""
        return self.request.longest_micro_batch(self.request.predictor())


def compare(request: Request) -> Comparison:
    """Plan and predict every candidate.

    Raises:
        ValueError: nothing fits in memory; the message says what would.
    """
    predictor = request.predictor()
    state = max(predictor.memory.state_bytes)
    if state > request.usable_bytes:
        raise ValueError(
            f"The model does not fit on the mesh {request.mesh}: parameters, gradients and"
            f" optimizer state take {state / 1e9:.1f} GB of a device, and"
            f" {_usable(request)} may be filled. {_what_fits(request)}"
        )
    scorer = ProfileScorer(predictor, request.activation_checkpointing)
    made = []
    for packing, sharding in request.candidates:
        plans = plan_steps(request.planner(packing, sharding, scorer), request.steps)
        made.append(Forecast(packing, sharding, [predictor.predict(plan) for plan in plans]))
    fit = [forecast for forecast in made if forecast.peak_bytes <= request.usable_bytes]
    if fit:
        return Comparison(request, fit, [forecast for forecast in made if forecast not in fit])
    least = min(made, key=lambda forecast: forecast.peak_bytes)
    tokens = request.longest_micro_batch(predictor)
    asked = request.activation_checkpointing
    other = "" if asked == "auto" else "; or --activation-checkpointing auto may"
    raise ValueError(
        f"The activations do not fit on the mesh {request.mesh}: with activation checkpointing"
        f" {asked!r}, packing {least.packing!r} with sharding {least.sharding!r}"
        f" would fill {least.peak_bytes / 1e9:.1f} GB of a device, of which"
        f" {_usable(request)} may be filled. Micro-batches of up to {tokens} tokens would fit here,"
        f" all as long{other}. {_what_fits(request)}"
    )


def _usable(request: Request) -> str:
    usable, profile = request.usable_bytes, request.profile
    percent = 100 * usable / profile.memory_bytes
    return f"{usable / 1e9:.1f} GB ({percent:.0f} % of {profile.device})"


def _what_fits(request: Request) -> str:
    """Advice: the smallest larger meshes on which the largest cap fits, all checkpointed."""
    cap = max(request.settings[packing].token_cap for packing, _ in request.candidates)
    found = []
    for factor in range(1, 9):
        for pipeline in range(factor + 1):
            for context in range(factor + 1 - pipeline):
                mesh = replace(
                    request.mesh,
                    pipeline=request.mesh.pipeline << pipeline,
                    context=request.mesh.context << context,
                    tensor=request.mesh.tensor << (factor - pipeline - context),
                )
                if _fits(request, mesh, cap):
                    found.append(",".join(map(str, mesh.shape)))
        if found:
            return (
                f"With full activation checkpointing, meshes of {mesh.devices} devices that"
                f" hold micro-batches of {cap} tokens: --mesh {' or '.join(found[:3])}."
            )
    return "No mesh of up to 256 times as many devices would hold it: use a smaller model."


def _fits(request: Request, mesh: Mesh, cap: int) -> bool:
    try:
        request.shape.check_tensor_parallel(mesh.tensor)
        predictor = request.predictor(mesh)
    except ValueError:
        return False
    count = -(-request.data.micro_batches // mesh.data)
    return predictor.longest_micro_batch(count, "full") >= cap


def _imbalance(level: str, steps: Sequence[Level]) -> dict[str, float]:
    degrees = [step.degree for step in steps]
    return {
        f"imbalance_{level}_mean": float(np.nanmean(degrees)),
        f"imbalance_{level}_p99": float(np.nanpercentile(degrees, 99)),
        f"imbalance_{level}_aggregate": sum(step.peak for step in steps)
        / sum(step.even for step in steps),
    }


@dataclass(frozen=True)
class Verdict:
    """Advice on a comparison."""

    request: Request
    chosen: Forecast  # the fastest that keeps documents whole
    reference: Forecast  # the fastest of best_fit
    attention: float  # attention's part of the documents' FLOPs

    @property
    def gain(self) -> float:
        """Tokens per second of the chosen candidate over those of ``best_fit``."""
        return self.chosen.tokens_per_second / self.reference.tokens_per_second

    @property
    def worth_it(self) -> bool:
        """Whether the gain is at least :data:`WORTH`."""
        return self.gain >= WORTH

    @property
    def figures(self) -> dict[str, Any]:
        """Plain numbers, and the words."""
        return {
            "packing": self.chosen.packing if self.worth_it else REFERENCE,
            "sharding": self.chosen.sharding if self.worth_it else self.reference.sharding,
            "worth_it": self.worth_it,
            "times_best_fit": self.gain,
            "attention_share": self.attention,
            "text": self.lines,
        }

    @property
    def lines(self) -> list[str]:
        """The words, each a line."""
        name, mesh = self.request.profile.name, ",".join(map(str, self.request.mesh.shape))
        kind = "" if self.request.profile.measured else ", which is not measured"
        title = f"Verdict, simulated with profile {name}{kind}:"
        share = f"Attention is {self.attention:.0%} of these documents' model FLOPs."
        if not self.worth_it:
            return [
                title,
                f"Not for you: on mesh {mesh} no packing compared here has {WORTH - 1:.0%} more"
                f" tokens/s than {REFERENCE} (the best, {self.chosen.packing}, {self.gain:.2f}"
                f" times, simulated with {name}). {share}",
                f"Take {REFERENCE} with sharding {self.reference.sharding}, or documents that are"
                " longer.",
            ]
        delay = f"{self.chosen.delay:.2f}"
        waits = f" Tokens wait {delay} steps on average." if float(delay) else ""
        return [
            title,
            f"Take packing {self.chosen.packing} with sharding {self.chosen.sharding} on mesh"
            f" {mesh}: {self.gain:.2f} times the tokens/s of {REFERENCE}"
            f" ({self.chosen.tokens_per_second:,.0f} to {self.reference.tokens_per_second:,.0f},"
            f" simulated with {name}). {share}{waits}",
        ]


def judged(comparison: Comparison) -> Verdict:
    """The verdict on a comparison."""
    request, rows = comparison.request, comparison.forecasts
    # If no row of best_fit fits in memory, their speed is still what to compare with.
    references = [row for row in rows if row.packing == REFERENCE] or [
        row for row in comparison.too_large if row.packing == REFERENCE
    ]
    reference = max(references, key=lambda row: row.tokens_per_second)
    whole = [row for row in rows if not PACKINGS[row.packing].cuts_stream]
    chosen = max(whole or references, key=lambda row: row.tokens_per_second)
    window = request.settings[REFERENCE].context_window
    attention = attention_share(request.shape, request.lengths, window)
    return Verdict(request, chosen, reference, attention)


def attention_share(shape: ModelShape, lengths: Lengths, window: int) -> float:
    """Attention's part of the forward FLOPs of all documents, cut at the window."""
    whole, rest = np.divmod(lengths, window)
    pieces = {window: int(whole.sum())}
    for tokens, count in zip(*np.unique(rest[rest > 0], return_counts=True), strict=True):
        pieces[int(tokens)] = pieces.get(int(tokens), 0) + int(count)
    attention = sum(count * attention_flops(shape, n) for n, count in pieces.items())
    linear = sum(count * linear_flops(shape, n) for n, count in pieces.items())
    return attention / (attention + linear)
