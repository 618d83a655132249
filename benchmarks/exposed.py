"""What a step waits for of messages that the package predicts as if they stood in the open.

Those of keys, and the last of four tensor-parallel ones of Hugging Face blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from benchmarks import slimpack_paper
from benchmarks.slimpack_paper import CORPORA, Case, K
from lightning_wlb.cost import latency as latency_module
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.overlap import Exposed, HalfLayer, halves
from lightning_wlb.cost.profile import Profile
from lightning_wlb.plan import StepPlan
from lightning_wlb.prediction import micro_batch, predictor
from lightning_wlb.prediction.predictor import Predictor

WAYS = ("open", "whole pieces", "everywhere", "and own keys", "no messages")


@contextmanager
def exposed_keys(way: str) -> Iterator[None]:
    """Let predictors count what is waited for of messages of keys, which they count whole.

    In forward they travel beside the queries' product, in backward, fetched again, beside that of
    outputs, and as gradients beside the gradient of queries by rows.
    """
    costs, exchange, times = (
        micro_batch.micro_batch_cost,
        micro_batch.KeyExchange.ns,
        micro_batch.times_by_mode,
    )
    sliced, messages, ranks = False, (0, 0), 1

    def cost(latency: LatencyModel, slices: Sequence[Any], placed: Any, **rest: Any) -> Any:
        nonlocal sliced
        sliced = rest.get("kept", False) or any(each.context for each in slices)
        return costs(latency, slices, placed, **rest)

    def ns(self: micro_batch.KeyExchange, kind: LatencyModel, keys: int) -> tuple[int, int]:
        nonlocal messages, ranks
        whole = exchange(self, kind, keys)
        if self.ranks == 1:
            messages = 0, 0
            return whole
        copies = [
            kind._traffic_ns(keys * kind._copied_bytes(backward=each)) for each in (False, True)
        ]
        messages, ranks = (whole[0] - copies[0], whole[1] - copies[1]), self.ranks
        return copies[0], copies[1]

    def exposed(kind: LatencyModel, rows: int, attention: Sequence[Any], exchange: Any) -> Any:
        there, back = messages
        forward, backward = (kind.products_ns(rows, each) for each in (False, True))
        share = halves(kind.shape.dim, kind.layer)[0].out
        slowed = 1 - 1 / kind.profile.slowed_beside
        own = min(first for first, _ in attention) / ranks if way == "and own keys" else 0.0

        def beside(message: float, product: float) -> float:
            if way == "no messages":
                return 0.0
            if way == "open" or (way == "whole pieces" and sliced):
                return message
            return max(message - product, message * slowed)

        fetched = beside(there, share * forward + own)
        again, returned = beside(there, share * backward), beside(back, share * backward / 2)
        # The backward repeats the forward's exchange.
        waits = fetched, returned + again - fetched
        return times(kind, rows, attention, [(a + waits[0], b + waits[1]) for a, b in exchange])

    with (
        mock.patch.object(predictor, "micro_batch_cost", cost),
        mock.patch.object(micro_batch.KeyExchange, "ns", ns),
        mock.patch.object(micro_batch, "times_by_mode", exposed),
    ):
        yield


def keys_behind_products(
    models: Sequence[str], windows: Sequence[int], profile: Profile
) -> dict[str, dict[str, float]]:
    """Steps of ``auto`` in SlimPack's settings, over those with all messages of keys in the open.

    Plans are those of the package, and tensor-parallel messages are behind products.
    """
    rows = {}
    for model in models:
        for window in windows:
            for name, corpus in CORPORA.items():
                case = Case(model, window * K, corpus, profile, overlap=True)
                with mock.patch.object(slimpack_paper, "summary", _each_way):
                    found = case.run(1, 1, 1)["auto"]
                rows[f"{model} {window}K {name}"] = {
                    way: found[way] / found["open"] for way in WAYS[1:]
                }
    return rows


def _each_way(plans: Sequence[StepPlan], model: Predictor, _: Predictor) -> dict[str, float]:
    result: dict[str, float] = {"ns_per_token": 1.0}
    for way in WAYS:
        with exposed_keys(way):
            fresh = replace(model, latency=replace(model.latency))
            result[way] = sum(fresh.predict(plan).total_ns for plan in plans)
    return result


@contextmanager
def late_gradients() -> Iterator[None]:
    """Let predictors hide sums of rows' gradients behind gradients of weights, and nothing else."""

    def exposed(latency: LatencyModel, rows: int, chunks: int = 0) -> tuple[Exposed, ...]:
        gather, scatter = latency.messages_ns(rows)
        of_weights = latency.products_ns(rows, True) / 2
        least = scatter * (1 - 1 / latency.profile.slowed_beside)

        def of_half(half: HalfLayer) -> Exposed:
            hidden = (half.into + half.out) * of_weights
            return Exposed(gather + scatter, gather + max(scatter - hidden, least), 0)

        return tuple(map(of_half, halves(latency.shape.dim, latency.layer)))

    with mock.patch.object(latency_module, "exposed_halves", exposed):
        yield
