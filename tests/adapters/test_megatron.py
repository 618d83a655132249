"""Megatron Core's schedulers replaced: same interface, each sequence once, no circle of waiting."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from lightning_wlb.adapters.megatron import (
    PlannedContextParallel,
    PlannedPacking,
)
from lightning_wlb.cost.flops import Work
from lightning_wlb.models.config import TransformerConfig


def megatron(name: str):
    return pytest.importorskip(f"megatron.core.{name}", reason="megatron", exc_type=ImportError)


def samples(count: int, longest: int, seed: int = 0) -> list[tuple[int, int]]:
    lengths = np.exp(np.random.default_rng(seed).normal(7, 1.4, count)).astype(int)
    return [(100 + i, int(n)) for i, n in enumerate(np.clip(lengths, 32, longest))]


def group_of(ranks: int) -> SimpleNamespace:
    return SimpleNamespace(size=lambda: ranks)


def busiest(groups, lengths: dict[int, int]) -> float:
    """Work of the longest rank over the mean's; groups wait for each other, as Megatron runs."""
    work = Work.of(TransformerConfig.preset("7b").shape).total
    total, waited = sum(work(tokens) for tokens in lengths.values()), 0.0
    for group in groups:
        shares = {i: sum(i in own for own in group) for own in group for i in own}
        waited += max(sum(work(lengths[i]) / shares[i] for i in own) for own in group)
    return waited * len(groups[0]) / total


@pytest.mark.parametrize("seed", range(4))
def test_context_groups_hold_and_nest(seed: int) -> None:
    given = samples(60, 40_000, seed)
    lengths = dict(given)
    scheduler = PlannedContextParallel(8192, group_of(8), model="7b")
    tokens, groups = scheduler.get_groups_and_subsamples(given, None)
    assert [[lengths[i] for i in own] for own in groups[0]] == tokens[0]
    homes = {i: [r for r, own in enumerate(groups[0]) if i in own] for i in lengths}
    for i, ranks in homes.items():
        size = len(ranks)
        assert size & (size - 1) == 0
        assert ranks == list(range(ranks[0], ranks[0] + size))
        assert ranks[0] % size == 0
        assert lengths[i] <= 8192 * size
    for own in groups[0]:
        assert own
        sizes = [len(homes[i]) for i in own]
        assert sizes == sorted(sizes, reverse=True)
    module = megatron("pipeline_parallel.hybrid_cp_schedule")
    peer = module.BalancedCPScheduler(8192, group_of(8))
    _, their_groups = peer.get_groups_and_subsamples(given, None)
    assert busiest(groups, lengths) <= busiest(their_groups, lengths)


def test_what_cannot_be_scheduled_is_refused() -> None:
    scheduler = PlannedContextParallel(1000, group_of(6), model="7b")
    with pytest.raises(ValueError, match="more than 1000 on each of 4 of 6 ranks"):
        scheduler.get_groups_and_subsamples([(0, 4001)])
    with pytest.raises(ValueError, match="leave some of 6 ranks idle"):
        scheduler.get_groups_and_subsamples([(0, 10)])
    with pytest.raises(ValueError, match="needs model="):
        PlannedContextParallel(10, group_of(2)).get_groups_and_subsamples([(0, 4)])


class Scheduler(PlannedPacking):
    """With the attributes that Megatron's base class sets."""

    model = "7b"

    def __init__(self, cap: int, context: int, data: int, multiple: int | None) -> None:
        self.max_seqlen_per_dp_cp_rank, self.cp_size, self.dp_size = cap, context, data
        self.microbatch_group_size_per_vp_stage = multiple


def test_packing_has_one_column_for_each_rank() -> None:
    given = samples(100, 16_000)
    lengths = dict(given)
    groups = Scheduler(10_000, 2, 4, 3).get_groups_and_subsamples(given)
    assert len(groups) % 3 == 0
    for group in groups:
        assert len(group) == 8
        assert group[0::2] == group[1::2]
        assert all(0 < sum(lengths[i] for i in own) <= 20_000 for own in group)
    assert sorted(i for group in groups for own in group[::2] for i in own) == sorted(lengths)
    with pytest.raises(ValueError, match="do not fill"):
        Scheduler(20_000, 1, 4, None).get_groups_and_subsamples(given[:3])
