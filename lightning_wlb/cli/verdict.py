"""What `lightning-wlb plan` advises in words: what to take, and whether it is worth it.

The advice is the compared row with most tokens per second that keeps documents whole, and its gain
is over ``best_fit``, which packs whole documents by their tokens. Below :data:`WORTH` the gain is
said to be none.

Below which length the gain is gone is found by the same simulation, of runs with the window and all
documents a half, a quarter, ... as long: a bisection over the powers of two. A step has as many
tokens as before, in more micro-batches, so that the pipeline's bubble does not pass for a gain of
balance. The mesh stays what it is, though one would choose another for short documents.

Cost: at most three more plans of two packings, with a quarter as many tokens as the compared rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_wlb.cli.forecast import Comparison, Forecast, compare
from lightning_wlb.cli.lengths import Lengths
from lightning_wlb.cli.request import REFERENCE, Request
from lightning_wlb.cost.flops import attention_flops, linear_flops
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.planning.packing import PACKINGS

WORTH = 1.03
"""Least gain that is called one: what the simulation leaves out is a few percent."""

HALVINGS = 7
"""Documents and window are halved at most so many times."""

LEAST_WINDOW = 512
"""A window is not halved below so many tokens."""

FEWEST_STEPS = 2


@dataclass(frozen=True)
class Shorter:
    """The same run with the window and all documents shorter.

    Args:
        factor: how many times as short.
        window: tokens of the context window.
        longest: tokens of the longest document.
        mean: tokens of the mean document.
        gain: tokens per second of the advised packing over those of ``best_fit``.
    """

    factor: int
    window: int
    longest: int
    mean: float
    gain: float

    def __str__(self) -> str:
        return (
            f"documents 1/{self.factor} as long (longest {self.longest:,} tokens, mean"
            f" {self.mean:,.0f}) in windows of {self.window:,}"
        )


@dataclass(frozen=True)
class Verdict:
    """Advice on a comparison. All figures but lengths are simulated.

    Args:
        request: what was asked.
        chosen: the row with most tokens per second that keeps documents whole.
        reference: the row of ``best_fit`` with most.
        attention: attention's part of the documents' FLOPs.
        pays: the shortest documents tried with which the gain is worth it, if any but the given.
        fails: the longest tried with which it is not; None if there were none.
    """

    request: Request
    chosen: Forecast
    reference: Forecast
    attention: float
    pays: Shorter | None
    fails: Shorter | None

    @property
    def gain(self) -> float:
        """Tokens per second over those of ``best_fit``."""
        return _gain(self.chosen, self.reference)

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
            "shorter": [dict(vars(each)) for each in (self.pays, self.fails) if each is not None],
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
            f" ({_speed(self.chosen):,.0f} to {_speed(self.reference):,.0f}, simulated with"
            f" {name}). {share}{waits}",
            self._threshold(),
        ]

    def _threshold(self) -> str:
        simulated = f"simulated with {self.request.profile.name}"
        if self.fails is None and self.pays is None:
            return "No shorter documents were tried: the window is as short as it may be."
        still = f"still {self.pays.gain:.2f} times with {self.pays}" if self.pays else ""
        if self.fails is None:
            return f"It is worth it on shorter documents, too: {still}, {simulated}."
        gone = f"only {self.fails.gain:.2f} times with {self.fails}"
        found = " and ".join(filter(None, (still, gone)))
        return f"It is not worth it on documents that are much shorter: {found}, {simulated}."


def judged(comparison: Comparison) -> Verdict:
    """The verdict on a comparison, with shorter documents planned and predicted."""
    request, rows = comparison.request, comparison.forecasts
    # Where all of its rows are too large for memory, their speed is still what to compare with.
    references = [row for row in rows if row.packing == REFERENCE] or [
        row for row in comparison.too_large if row.packing == REFERENCE
    ]
    reference = max(references, key=_speed)
    whole = [row for row in rows if not PACKINGS[row.packing].cuts_stream]
    chosen = max(whole or references, key=_speed)
    pays = fails = None
    if _gain(chosen, reference) >= WORTH:
        pays, fails = _bounds(request, chosen, reference)
    window = request.settings[REFERENCE].context_window
    attention = attention_share(request.shape, request.lengths, window)
    return Verdict(request, chosen, reference, attention, pays, fails)


def _bounds(
    request: Request, chosen: Forecast, reference: Forecast
) -> tuple[Shorter | None, Shorter | None]:
    """The shortest documents with which a row pays, and the longest with which it does not."""
    pays, fails = None, None
    window = request.settings[REFERENCE].context_window
    low, high = 0, min(HALVINGS, max((window // LEAST_WINDOW).bit_length() - 1, 0)) + 1
    while high - low > 1:
        power = (low + high) // 2
        tried = _shorter(request, chosen, reference, power)
        if tried.gain >= WORTH:
            low, pays = power, tried
        else:
            high, fails = power, tried
    return pays, fails


def _shorter(request: Request, chosen: Forecast, reference: Forecast, power: int) -> Shorter:
    """The rows again, with the window and all documents halved so many times."""
    factor = 2**power
    lengths = np.maximum(request.lengths // factor, 1)
    keys = [(row.packing, row.sharding) for row in (chosen, reference)]
    settings = {
        packing: replace(
            data,
            context_window=data.context_window // factor,
            micro_batches=data.micro_batches * factor,
            cap=None if data.cap is None else data.cap // factor,
        )
        for packing, data in request.settings.items()
    }
    # As many documents in all as a quarter of the steps had.
    steps = max(request.steps // (4 * factor), FEWEST_STEPS)
    again = compare(
        replace(request, lengths=lengths, settings=settings, steps=steps, candidates=keys)
    )
    made = {(row.packing, row.sharding): row for row in (*again.forecasts, *again.too_large)}
    gain = _gain(*(made[key] for key in keys))
    window = settings[REFERENCE].context_window
    return Shorter(factor, window, int(lengths.max()), float(lengths.mean()), gain)


def _speed(row: Forecast) -> float:
    return row.tokens * 1e9 / row.total_ns


def _gain(chosen: Forecast, reference: Forecast) -> float:
    return _speed(chosen) / _speed(reference)


def attention_share(shape: ModelShape, lengths: Lengths, window: int) -> float:
    """Of the forward FLOPs of all documents, cut at the window."""
    whole, rest = np.divmod(lengths, window)
    pieces = {window: int(whole.sum())}
    for tokens, count in zip(*np.unique(rest[rest > 0], return_counts=True), strict=True):
        pieces[int(tokens)] = pieces.get(int(tokens), 0) + int(count)
    attention = sum(count * attention_flops(shape, n) for n, count in pieces.items())
    linear = sum(count * linear_flops(shape, n) for n, count in pieces.items())
    return attention / (attention + linear)
