"""The one call of a model, in every way that rows lie, against dense attention with all options."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions
from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.attention.metadata import AttentionMetadata, SliceMetadata
from lightning_wlb.attention.packed import packed_attention
from lightning_wlb.distributed.process_groups import NO_GROUPS, ProcessGroups
from lightning_wlb.plan import Slice
from lightning_wlb.sharding import layout, rank_indices
from lightning_wlb.sharding.sliced_indices import SlicedReplica
from tests.attention.support import as_it_is, everything, rank_errors
from tests.ranks import run_ranks

SINKS = torch.tensor([-2.0, 0.0, 1.0, 5.0], dtype=torch.float64)
EVERY_OPTION = [
    PLAIN,
    AttentionOptions(sinks=SINKS),
    AttentionOptions(sliding_window=6, sinks=SINKS),
    AttentionOptions(softcap=1.5),
    AttentionOptions(0.3, 9, 1.5, SINKS),
]
MICRO_BATCHES: list[list[int]] = [[1], [3, 7, 5, 1, 13], [97, 1, 31], []]


def errors(
    rank: int,
    sharding: str,
    lengths: list[int],
    groups: ProcessGroups,
    options: AttentionOptions,
    value_dim: int | None = None,
    recomputed: bool = False,
    inside: bool = True,
) -> list[float]:
    """This rank's part of the relative errors.

    ``inside`` says whether attention is given functions that compute queries and project.
    """
    made = layout(sharding, lengths, 1 if groups == NO_GROUPS else dist.get_world_size(), 1)
    indices = rank_indices(made, rank, options.sliding_window)
    kernels = int(len(indices.offset) > 0)

    def attend(q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, *rest: Any) -> Tensor:
        attention, of_layer = rest
        of_group = replace(metadata, replicas=2 if groups.merged else 1)
        described = of_group.for_layer(0, recomputed)
        queries, project = (lambda: q, as_it_is) if inside else (q, None)
        return packed_attention(queries, k, v, project, described, attention, groups, of_layer)

    return rank_errors(attend, made, indices, kernels, options=options, value_dim=value_dim)


def check_two(rank: int) -> float:
    context = ProcessGroups(context=dist.group.WORLD)
    merged = ProcessGroups(merged={2: dist.group.WORLD})
    every = product(
        [("per_document", context), ("per_sequence", merged)],
        MICRO_BATCHES,
        EVERY_OPTION,
        [(None, False, True), (None, False, False), (None, True, True), (5, False, False)],
    )
    return max(
        error
        for (sharding, groups), lengths, options, how in every
        for error in errors(rank, sharding, lengths, groups, options, *how)
    )


def test_two_ranks_equal_dense_attention() -> None:
    assert max(run_ranks(check_two, 2)) <= 1e-12


@pytest.mark.parametrize("options", EVERY_OPTION)
@pytest.mark.parametrize("value_dim", [None, 5])
@pytest.mark.parametrize("inside", [False, True])
def test_one_rank_equals_dense_attention(
    options: AttentionOptions, value_dim: int | None, inside: bool
) -> None:
    for lengths in MICRO_BATCHES:
        found = errors(0, "hybrid", lengths, NO_GROUPS, options, value_dim=value_dim, inside=inside)
        assert max(found) <= 1e-12


def slices_of(
    cuts: list[int],
    rank: int = 0,
    ranks: int = 1,
    window: int | None = None,
) -> Iterator[tuple[AttentionMetadata, Tensor]]:
    """One piece, each of its slices a micro-batch: metadata, and which tokens the rows hold."""
    members = [[Slice(0, 0, *edges)] for edges in pairwise(cuts)]
    layouts = [layout("per_document", [part.tokens], ranks, 1) for (part,) in members]
    replica, cache = SlicedReplica(layouts, members, window), KeyValueCache()
    for number, made in enumerate(layouts):
        indices = replica.indices(number, rank)
        slices = SliceMetadata(number, indices.runs, indices.rows, indices.keeps, cache)
        metadata = AttentionMetadata.from_indices(indices.own, made.rows, ranks, window)
        yield replace(metadata, slices=slices), torch.from_numpy(indices.positions)


def sliced_errors(
    rank: int,
    groups: ProcessGroups,
    options: AttentionOptions,
    value_dim: int | None,
    recomputed: bool,
    at_once: bool = False,
) -> list[float]:
    """As :func:`errors`, of a piece in four slices, one of a single token."""
    cuts = [0, 40, 41, 48, 90]
    ranks = 1 if groups == NO_GROUPS else dist.get_world_size()
    inputs, wanted = everything([90], torch.float64, options=options, value_dim=value_dim)
    sinks = [] if options.sinks is None else [options.sinks.clone().requires_grad_()]
    options = replace(options, sinks=sinks[0] if sinks else None)
    attention = VarlenAttention("cpu")
    found = [torch.zeros_like(x) for x in wanted]
    steps = []
    for metadata, tokens in slices_of(cuts, rank, ranks, options.sliding_window):
        rows = [torch.full((metadata.rows, *x.shape[1:]), math.nan, dtype=x.dtype) for x in inputs]
        for row, x in zip(rows, inputs, strict=True):
            row[: metadata.queries] = x[tokens]
        leaves = [row.requires_grad_() for row in rows[:3]]
        described = metadata.for_layer(0, recomputed)
        out = packed_attention(*leaves, None, described, attention, groups, options)
        found[0][tokens] = out.detach()[: metadata.queries]
        steps.append((out, leaves, rows[3], tokens))
    if at_once:
        torch.autograd.backward([step[0] for step in steps], [step[2] for step in steps])
    for out, leaves, gradient, tokens in reversed(steps):
        if not at_once:
            out.backward(gradient)
        for total, leaf in zip(found[1:], leaves, strict=False):
            assert leaf.grad is not None
            total[tokens] = leaf.grad[: len(tokens)]
    if sinks:
        assert sinks[0].grad is not None
        found[4] = sinks[0].grad
    if ranks > 1:
        for each in found:
            dist.all_reduce(each)
    return [
        float((mine - whole).norm() / whole.norm().clamp(min=1))
        for mine, whole in zip(found, wanted, strict=True)
    ]


def check_slices(rank: int) -> float:
    groups = ProcessGroups(context=dist.group.WORLD)
    return max(
        error
        for options, value_dim, recomputed in product(EVERY_OPTION, [None, 5], [False, True])
        for error in sliced_errors(rank, groups, options, value_dim, recomputed)
    )


def test_slices_on_two_ranks_equal_dense_attention() -> None:
    assert max(run_ranks(check_slices, 2)) <= 1e-12


@pytest.mark.parametrize("options", EVERY_OPTION)
@pytest.mark.parametrize("value_dim", [None, 5])
@pytest.mark.parametrize("at_once", [False, True])
def test_slices_on_one_rank_equal_dense_attention(
    options: AttentionOptions, value_dim: int | None, at_once: bool
) -> None:
    assert max(sliced_errors(0, NO_GROUPS, options, value_dim, False, at_once)) <= 1e-12


def one_piece(options: AttentionOptions) -> AttentionMetadata:
    made = layout("per_document", [4], 1, 1)
    indices = rank_indices(made, 0)
    return AttentionMetadata.from_indices(indices, 4, 1, options.sliding_window)


def test_what_does_not_fit_is_refused() -> None:
    q = torch.zeros(4, 2, 8)
    call: Callable[..., Tensor] = packed_attention
    rest = None, one_piece(PLAIN), VarlenAttention("cpu"), NO_GROUPS
    with pytest.raises(ValueError, match=r"v \(4, 2, 9\): values may be narrower than keys"):
        call(q, q, torch.zeros(4, 2, 9), *rest)
    with pytest.raises(ValueError, match=r"sinks \(3,\).*one for each of this rank's query heads"):
        call(q, q, q, *rest, AttentionOptions(sinks=torch.zeros(3)))
