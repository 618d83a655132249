"""Simulates steps of documents that somebody else packed, for ``benchmarks.packers``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import peers
from lightning_wlb.cost.flops import Work
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.plan import MicroBatch, Recompute, ReplicaPlan, Slice
from lightning_wlb.planning.global_batches import StreamPosition, next_pieces
from lightning_wlb.planning.replica_plans import replica_plan
from lightning_wlb.prediction.micro_batch import (
    MODES,
    MicroBatchCost,
    micro_batch_cost,
    over_layers,
    times_by_mode,
)
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step_totals import orders_of, peak_bytes, step_times
from lightning_wlb.sharding import Layout, choose

WINDOW = 131_072

Packed = list[list[list[Slice]]]
"""[replicas][micro-batches], the slices of a step."""


class Outcome(NamedTuple):
    """The simulated steps of a packer on a mesh, or of several.

    Attributes:
        ns: time of all steps.
        flops: their model FLOPs.
        tokens: what they train on.
        idle: share of the devices' time in which they do not work on layers or ends.
        keys: share in which keys and values are exchanged between context-parallel ranks.
        again: share that is recomputation.
        peak: bytes of the fullest rank.
        mode: what is recomputed.
    """

    ns: int
    flops: int
    tokens: int
    idle: float
    keys: float
    again: float
    peak: int
    mode: Recompute

    @property
    def rate(self) -> float:
        """Time per FLOP of the model."""
        return self.ns / self.flops


def whole(lengths: Sequence[int], packs: peers.Packs) -> Packed:
    """Packs of whole documents, as slices."""
    return [
        [[Slice(index, 0, 0, int(lengths[index])) for index in group] for group in own]
        for own in packs
    ]


def windows_of(lengths: np.ndarray) -> list[list[Slice]]:
    """Documents one after another, cut into windows; the last one, which is short, is left out."""
    tokens = int(lengths.sum()) // WINDOW * WINDOW
    order, begin = np.arange(len(lengths)), StreamPosition()
    pieces, _ = next_pieces(order, lengths, begin, tokens, WINDOW, cuts_stream=True)
    rows: list[list[Slice]] = []
    filled = WINDOW
    for document, start, stop in pieces:
        if filled == WINDOW:
            rows.append([])
            filled = 0
        rows[-1].append(Slice(document, start, start, stop))
        filled += stop - start
    return rows


def simulated(predictor: Predictor, steps: Sequence[Packed], sharding: str) -> Outcome | None:
    """The steps of a packer on the predictor's mesh; None where none of the modes fits."""
    made = []
    for packed in steps:
        plans = [replica_plan(own, at, sharding) for at, own in enumerate(packed)]
        made.append((plans, [predictor.costs(each) for each in plans]))
    pieces = [part for packed in steps for own in packed for group in own for part in group]
    return of_costs(predictor, made, [part.tokens for part in pieces])


def of_costs(
    predictor: Predictor,
    steps: Sequence[tuple[list[ReplicaPlan], list[list[MicroBatchCost]]]],
    lengths: Sequence[int],
    modes: Sequence[Recompute] = MODES,
) -> Outcome | None:
    """The outcome of steps, each replicas with the costs of their micro-batches.

    Args:
        predictor: of the mesh.
        steps: the replicas of each, and the costs [replicas][micro-batches].
        lengths: tokens of the pieces of all steps.
        modes: what may be recomputed, least first; the first that fits in all steps is taken.
    """
    mesh = predictor.latency.mesh
    total = Work.of(predictor.latency.shape).total
    for mode in modes:
        spent, peaks, busy = 0, [], []
        for replicas, costs in steps:
            moded = [[cost._replace(recompute=mode) for cost in own] for own in costs]
            orders = orders_of(replicas)
            peaks.append(peak_bytes(predictor, moded, orders))
            if peaks[-1] > predictor.usable_bytes:
                break
            spent += step_times(predictor, replicas, moded, orders).total_ns
            busy += [busy_ns(predictor, own) for own in moded]
        else:
            shares = np.sum(busy, axis=0) / (spent * mesh.pipeline * mesh.data)
            return Outcome(
                spent, sum(map(total, lengths)), sum(lengths), 1 - shares[0], *shares[1:].tolist(),
                max(peaks), mode,
            )  # fmt: skip
    return None


def busy_ns(predictor: Predictor, costs: Sequence[MicroBatchCost]) -> tuple[float, float, float]:
    """What a replica's ranks do, in ns over its stages, on the mean of its context ranks.

    Returns:
        All of the layers and ends; of it the exchange of keys; of it recomputation.
    """
    latency = predictor.latency
    forward, backward = predictor.stage_durations(costs)
    waits = keys = again = 0.0
    for cost in costs:
        least = cost.by_mode[0]
        waits += latency.shape.layers * (sum(cost.attention_ns) - sum(cost.mean_attention_ns))
        keys -= latency.shape.layers * sum(least.attention_ns)
        for count, kind, ns, plain in zip(
            latency.shape.kinds.values(), latency.kinds, cost.layer_ns, least.layer_ns, strict=True
        ):
            products = kind.rows_ns(cost.rows)
            keys += count * (sum(plain) - products.forward - products.backward)
            again += count * (sum(ns) - sum(plain))
    return sum(map(sum, (*forward, *backward))) - waits, keys, again


def hybrid(
    request: MeshRequest,
    mesh: Mesh,
    steps: Sequence[Sequence[int]],
    limit: int,
    clones: Path | None,
) -> Outcome | None:
    """Megatron's hybrid context parallelism on data × context ranks of one stage.

    A rank runs its documents one by one; groups wait for each other, so that the step is that of a
    rank that runs the documents of each group's slowest rank. Its memory is that of the largest
    document's share.
    """
    ranks = mesh.data
    predictor = request.predictor(mesh)
    known: dict[tuple[int, int], MicroBatchCost] = {}

    def cost(tokens: int, shared: int) -> MicroBatchCost:
        key = tokens, shared
        if key not in known:
            of_shared = request.predictor(replace(mesh, data=ranks // shared, context=shared))
            known[key] = of_shared.micro_batch([Slice(0, 0, 0, tokens)], "per_document")
        return known[key]

    slowest, fullest, busy, wide = [], [], np.zeros(3), 0.0
    for lengths in steps:
        chain: list[MicroBatchCost] = []
        for group in peers.megatron_hybrid(lengths, ranks, limit, clones):
            shared = {index: sum(index in own for own in group) for own in group for index in own}
            of_ranks = [[cost(lengths[index], shared[index]) for index in own] for own in group]
            times = np.array([busy_ns(predictor, own) for own in of_ranks])
            chain += of_ranks[int(times[:, 0].argmax())]
            busy += times.sum(axis=0)
            wide += ranks * times[:, 0].max()
        slowest.append(([alike(len(chain))], [chain]))
        most = sorted(known.values(), key=lambda each: each.rows)[-4:]
        fullest.append(([alike(len(most))], [most]))
    every = [tokens for lengths in steps for tokens in lengths]
    memory = of_costs(predictor, fullest, every)
    if memory is None:
        return None
    time = of_costs(predictor, slowest, every, MODES[MODES.index(memory.mode) :])
    if time is None:
        return None
    # The shares of the slowest ranks, spread over all ranks.
    all_, keys, _ = (1 - time.idle) * ranks * busy / wide
    return time._replace(peak=max(time.peak, memory.peak), idle=1 - all_, keys=keys)


def alike(count: int) -> ReplicaPlan:
    """A replica of so many micro-batches, whose costs are given otherwise."""
    slices = tuple(Slice(at, 0, 0, 1) for at in range(count))
    forward = tuple(MicroBatch((at,), "per_document", 1, (0,)) for at in range(count))
    return ReplicaPlan(slices, forward)


def attention_anywhere(
    predictor: Predictor, steps: Sequence[Sequence[int]], count: int
) -> Outcome | None:
    """Steps whose attention is spread evenly over all ranks, at no cost for moving it.

    Tokens are dealt evenly: each of a replica's ``count`` micro-batches has the same rows on every
    rank. Of the attention, the kernels of all documents whole, every micro-batch's ranks do the
    same share, and no keys are exchanged. What is left are the products at so many rows,
    tensor-parallel communication, the pipeline's fill and drain, and parameters.
    """
    latency = predictor.latency
    mesh = latency.mesh
    made = []
    for lengths in steps:
        shares = mesh.data * mesh.context * count
        rows = -(-sum(lengths) // shares)
        rows += -rows % mesh.tensor
        each = np.array(lengths, dtype=np.int64)
        of_kinds = []
        for kind in latency.kinds:
            forward, backward = (ns // shares for ns in kind.attention_ns(each, each))
            of_kinds.append(times_by_mode(kind, rows, [(forward, backward)], [(0, 0)]))
        cost = MicroBatchCost(rows, rows, 0, 0, over_layers(latency, of_kinds))
        made.append(([alike(count)] * mesh.data, [[cost] * count] * mesh.data))
    return of_costs(predictor, made, [tokens for lengths in steps for tokens in lengths])


def balancers(request: MeshRequest, lengths: np.ndarray) -> dict[str, dict[str, float]]:
    """Torch's balancers of context parallelism on windows cut from the concatenated documents.

    Returns:
        By context ranks: time of a layer, forward and backward, over that of the ``adaptive``
        sharding, and the share of the latter in which its ranks wait for the slowest's attention.
    """
    result = {}
    for ranks in (2, 4, 8):
        latency = request.predictor(Mesh(request.devices // ranks, 1, ranks, 1)).latency
        spent = dict.fromkeys(("head_tail", "ptrr", "adaptive"), 0)
        waits = 0.0
        for row in windows_of(lengths)[:8]:
            own = [part.tokens for part in row]
            whole_pieces = [Slice(at, 0, 0, tokens) for at, tokens in enumerate(own)]
            for way in spent:
                if way == "adaptive":
                    _, placed = choose(own, ranks, 1, latency.segment_cost)
                else:
                    placed = torch_layout(own, ranks, way)
                cost = micro_batch_cost(latency, whole_pieces, placed)
                spent[way] += sum(map(sum, cost.layer_ns))
            waits += sum(cost.attention_ns) - sum(cost.mean_attention_ns)
        ours = spent.pop("adaptive")
        result[str(ranks)] = {way: ns / ours for way, ns in spent.items()} | {"waits": waits / ours}
    return result


def torch_layout(lengths: Sequence[int], ranks: int, balancer: str) -> Layout:
    """Where one of torch's balancers puts the tokens; its ranks gather all keys."""
    ends = np.cumsum(lengths)
    table = []
    for rank, ranges in enumerate(peers.torch_chunks(lengths, ranks, balancer)):
        for start, stop in ranges:
            while start < stop:
                document = int(np.searchsorted(ends, start, side="right"))
                begin = int(ends[document]) - lengths[document]
                end = min(stop, int(ends[document]))
                table.append((rank, document, start - begin, end - begin))
                start = end
    chunks = np.array(table, dtype=np.int64)
    first = np.searchsorted(chunks[:, 0], np.arange(ranks + 1))
    rows = sum(lengths) // ranks
    return Layout(tuple(lengths), rows, rows, chunks, first)
