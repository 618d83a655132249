"""What `lightning-wlb plan` finds: predicted steps of every packing, and a verdict in words.

Figures over steps are given as mean, 99th percentile and *aggregate*, the quotient of the sums over
all steps: steps differ in tokens, so a mean of quotients misleads.

The verdict is about a packing that keeps documents whole. It is compared with common practice,
cutting and concatenating (``original``), per token and for equal work, since a cut saves attention.
A gain below :data:`WORTH` over ``best_fit``, which packs by tokens alone, counts as none.

Cost: planning and predicting every step of every packing. `auto` simulates several plans a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lightning_wlb.callbacks.imbalance import Imbalance, predicted_imbalance
from lightning_wlb.cli.request import BASELINE, DEFAULT, PRACTICE, REFERENCE
from lightning_wlb.cost.flops import attention_flops, linear_flops
from lightning_wlb.mesh_search.evaluate import MeshRow, evaluate, name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.plan import piece_counts
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.prediction.step import StepPrediction

WORTH = 1.03
"""The least quotient that counts as a gain: the simulation leaves out a few percent."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """The predicted steps of a packing, and their figures together."""

    packing: str
    row: MeshRow
    steps: Sequence[StepPrediction] = ()  # empty in a search

    @property
    def delay(self) -> float:
        """Steps that a token waits on average."""
        held = sum(step.plan.delay * step.plan.tokens for step in self.steps)
        return held / self.row.tokens

    def over(self, other: Forecast) -> float:
        """Tokens per second of this forecast over those of another one."""
        return self.row.tokens_per_second / other.row.tokens_per_second

    @property
    def idle(self) -> float:
        """The mean over steps of the share of the ranks' time in which they wait."""
        return float(np.mean([step.bubble for step in self.steps]))

    @property
    def typical_step(self) -> StepPrediction:
        """The step most like the row of the table, for a picture.

        It is near to the mean time above all, so that pictures of packings compare as their rows
        do, and near to the mean tokens and idle time.
        """
        time, tokens = self.row.steps_ns / self.row.steps, self.row.tokens / self.row.steps

        def distance(step: StepPrediction) -> float:
            timed, sized = abs(step.total_ns / time - 1), abs(step.plan.tokens / tokens - 1)
            return 5 * timed + sized + abs(step.bubble - self.idle)

        return min(self.steps, key=distance)

    def summary(self, baseline: Forecast) -> dict[str, Any]:
        """Plain numbers; speed-ups are over ``baseline``, per token and per model FLOP.

        The two differ if packings cut differently: a document cut at a window costs less attention.
        """
        row, base, profile = self.row, baseline.row, self.steps[0].latency.profile
        plans = [step.plan for step in self.steps]
        levels = [predicted_imbalance(step) for step in self.steps]
        times = np.array([step.total_ns for step in self.steps]) / 1e6
        tokens = np.array([plan.tokens for plan in plans])
        waited, sent = np.sum([step.waited_ns for step in self.steps], axis=0).tolist()
        return {
            "packing": self.packing,
            "steps": row.steps,
            "tokens": row.tokens,
            "tokens_per_step": float(tokens.mean()),
            "tokens_per_step_spread": float(tokens.std() / tokens.mean()),
            **{
                f"imbalance_{name}_aggregate": sum(each.peak for each in steps)
                / sum(each.even for each in steps)
                for name, steps in zip(Imbalance._fields, zip(*levels, strict=True), strict=True)
            },
            "delay_mean": self.delay,
            "delay_max": max(plan.max_delay for plan in plans),
            "idle": self.idle,
            "step_ms_mean": float(times.mean()),
            "step_ms_p99": float(np.percentile(times, 99)),
            "tokens_per_second": row.tokens_per_second,
            "model_flop_utilisation": row.flops_per_second / row.mesh.devices / profile.peak_flops,
            "peak_gigabytes": row.peak_bytes / 1e9,
            "recomputed": row.recomputed,
            # The share of tensor-parallel messages' time that overlaps with matrix products.
            "hidden_messages": 1 - waited / sent if sent else 0.0,
            "speedup_per_token": self.over(baseline),
            "speedup_per_flop": base.times(row),
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """The packings that were planned on a mesh; ``request`` is that of the baseline packing."""

    request: MeshRequest
    forecasts: Sequence[Forecast]  # of those that fit in memory, the baseline first if it does
    too_large: Sequence[Forecast]  # of those that do not fit

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Figures of each packing that fits in memory; speed-ups are over the first."""
        return [forecast.summary(self.forecasts[0]) for forecast in self.forecasts]


def compare(requests: Sequence[MeshRequest]) -> Comparison:
    """Plan and predict every packing: a request for each, on one mesh, the baseline first."""
    request = requests[0]
    predictor = request.predictor(request.mesh)
    state = max(predictor.memory.state_bytes)
    if state > predictor.usable_bytes:
        raise _too_large(request, "model", "its state", state)
    fit: list[Forecast] = []
    too_large: list[Forecast] = []
    for each in requests:
        found = evaluate(each, each.mesh)
        made = Forecast(each.data.packing_choice.method, found.row, found.steps)
        (fit if found.fits else too_large).append(made)
    if fit:
        return Comparison(request, fit, too_large)
    least = min(too_large, key=lambda forecast: forecast.row.peak_bytes)
    what, held = f"run with packing {least.packing}", "all that it holds"
    raise _too_large(request, what, held, least.row.peak_bytes)


def _too_large(request: MeshRequest, what: str, held: str, size: int) -> ValueError:
    usable, profile = request.predictor(request.mesh).usable_bytes, request.profile
    return ValueError(
        f"The {what} does not fit on the mesh {request.mesh} with activation checkpointing"
        f" {request.activation_checkpointing!r}: {held} would fill {size / 1e9:.3g} GB of a device,"
        f" of which {usable / 1e9:.3g} GB ({100 * usable / profile.memory_bytes:.0f} % of"
        f" {profile.device}) may be filled. --mesh auto --devices {request.devices} --micro-batches"
        f" {request.data.micro_batches} finds a mesh for it, or says how many devices it takes."
    )


@dataclass(frozen=True)
class Verdict:
    """Advice in words: what balancing gains over cutting and concatenating, and ``best_fit``."""

    request: MeshRequest  #: the documents, the model and the profile of the simulation
    chosen: Forecast  #: a packing that keeps documents whole
    original: Forecast | None  #: ``original`` at its fastest; None: it fits on no mesh
    reference: Forecast | None  #: ``best_fit`` at its fastest; None: it fits on no mesh
    searched: bool = False  #: whether each is on its own best mesh; else all are on one mesh
    #: another packing that keeps documents whole, if one is faster, but by less than ``WORTH``
    faster: Forecast | None = None

    @property
    def gain(self) -> float:
        """Tokens per second of the chosen one over those of ``best_fit``."""
        return math.inf if self.reference is None else self.chosen.over(self.reference)

    @property
    def worth_it(self) -> bool:
        """Whether the gain is at least :data:`WORTH`."""
        return self.gain >= WORTH

    @property
    def advised(self) -> Forecast:
        """The packing and the mesh to take."""
        return self.chosen if self.worth_it or self.reference is None else self.reference

    @cached_property
    def attention(self) -> float:
        """Attention's part of the forward FLOPs of all documents, cut at the window."""
        shape = self.request.shape
        pieces = piece_counts(self.request.lengths, self.request.data.context_window)
        attention = sum(count * attention_flops(shape, n) for n, count in pieces.items())
        linear = sum(count * linear_flops(shape, n) for n, count in pieces.items())
        return attention / (attention + linear)

    @property
    def figures(self) -> dict[str, Any]:
        """The verdict in plain data: its figures, and the lines in words."""
        mine, cut = self.chosen, self.original
        return {
            "packing": self.advised.packing,
            "sharding": self.request.sharding,
            "mesh": ",".join(map(str, self.advised.row.mesh.shape)),
            "worth_it": self.worth_it,
            "times_original": cut and mine.over(cut),
            "times_original_for_equal_work": cut and cut.row.times(mine.row),
            "times_best_fit": self.gain if self.reference else None,
            "attention_share": self.attention,
            "text": self.lines,
        }

    @property
    def lines(self) -> list[str]:
        """The verdict in words, line by line."""
        profile, chosen, advised = self.request.profile, self.chosen, self.advised
        named = profile.accuracy and f", {profile.accuracy}"
        take = f"Take packing {advised.packing} with sharding {self.request.sharding}"
        take += f" on mesh {name_of(advised.row.mesh)}."
        if not self.worth_it and chosen.packing != REFERENCE:
            take = (
                f"Balancing is not for you: {chosen.packing} has less than {WORTH - 1:.0%} more"
                f" tokens/s than {REFERENCE}. {take}"
            )
        if self.faster and advised is chosen:
            take += (
                f" {self.faster.packing} has {_times(self.faster.over(chosen))} times the tokens/s"
                f" of {chosen.packing}; for less than {WORTH} the default stays."
            )
        delay = f"{chosen.delay:.2f}"
        waits = f"; tokens wait {delay} steps on average" if float(delay) else ""
        layers = self.request.shape.each_layer
        without = sum(not layer.attends for layer in layers)
        few = f", as {without} of {len(layers)} layers do not attend" * (without > 0)
        here = (
            "" if self.searched else " All on this mesh: --mesh auto gives each its own best one."
        )
        return [
            f"Verdict, simulated with profile {profile.name}{named}:",
            take,
            *self._comparisons(),
            f"Attention is {self.attention:.0%} of these documents' model FLOPs{few}{waits}.{here}",
        ]

    @property
    def _cuts(self) -> str:
        """Which documents a packing cuts that keeps a document whole if it fits in the window."""
        lengths, window = self.request.lengths, self.request.data.context_window
        beyond = lengths[lengths > window]
        if not len(beyond):
            return "cuts no document"
        return (
            f"cuts only documents longer than the window: {len(beyond):,} of {len(lengths):,}, with"
            f" {beyond.sum() / lengths.sum():.0%} of tokens"
        )

    def _comparisons(self) -> Iterator[str]:
        """The chosen packing compared with common practice, and with packing by tokens."""
        mine = self.chosen
        for packing, other in ((BASELINE, self.original), (REFERENCE, self.reference)):
            how = f"{PRACTICE[packing]} ({packing})"
            if other is None:
                yield f"Beside {how}: that fits in memory on no mesh of these devices."
            elif mine.packing != packing:
                where = f" on its own best mesh, {name_of(other.row.mesh)}" * self.searched
                speeds = f"{mine.row.tokens_per_second:,.0f} to {other.row.tokens_per_second:,.0f}"
                equal = _times(other.row.times(mine.row))
                for_work = f", {equal} times for equal work, and {self._cuts}"
                yield (
                    f"Beside {how}{where}: {mine.packing} has {_times(mine.over(other))} times its"
                    f" tokens/s ({speeds}){for_work * (packing == BASELINE)}."
                )


def _times(quotient: float) -> str:
    """A quotient with two digits; a gain below :data:`WORTH` is not rounded up to it."""
    return f"{quotient if quotient >= WORTH else min(quotient, WORTH - 0.01):.2f}"


def judged(comparison: Comparison) -> Verdict:
    """The verdict on a comparison.

    It is about the default packing, unless another that keeps documents whole is faster by
    :data:`WORTH`. So ``plan`` has the same verdict on a given mesh as on one that it has found.
    """
    fit = {row.packing: row for row in comparison.forecasts}
    # If a reference does not fit in memory, its speed is still what to compare with.
    every = {row.packing: row for row in comparison.too_large} | fit
    original, reference, usual = every.get(BASELINE), every.get(REFERENCE), fit.get(DEFAULT)
    whole = [row for name, row in fit.items() if not PACKINGS[name].cuts_stream]
    chosen = max(whole, key=lambda row: row.row.tokens_per_second, default=reference)
    assert chosen is not None
    faster = None
    if usual is not None and (quotient := chosen.over(usual)) < WORTH:
        faster = chosen if quotient >= 1.005 else None
        chosen = usual
    return Verdict(comparison.request, chosen, original, reference, faster=faster)


def provenance(request: MeshRequest) -> str:
    """The profile in words, with a caution if it was measured on a model of another shape."""
    measured, asked = request.profile.shape, asdict(request.shape)
    differs = any(measured[name] != asked[name] for name in measured if name != "layers")
    where = f", measured on layers of dim {measured['dim']} and extrapolated" if differs else ""
    experts = any(layer.idle_parameters for layer in request.shape.kinds)
    rate = " Experts are taken to compute at the rate of dense layers." if experts else ""
    return f"{request.profile.provenance}{where}.{rate}"


def report_head(request: MeshRequest, source: str, model: str, mesh: str) -> dict[str, Any]:
    """The first entries of every JSON report of ``plan``; the texts are the options as given."""
    said = ("name", "device", "dtype", "measured", "date")
    return {
        "command": "plan",
        "simulated": True,
        "profile": {name: getattr(request.profile, name) for name in said},
        "lengths": source,
        "documents": len(request.lengths),
        "mean_length": float(np.mean(request.lengths)),
        "model": model,
        "mesh": mesh,
        "seed": request.data.seed,
        "context_window": request.data.context_window,
        "micro_batches": request.data.micro_batches,
        "sharding": request.sharding,
        "steps": request.steps,
    }
