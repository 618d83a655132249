"""Which ranks share the rows of a micro-batch."""

import torch.distributed as dist

from lightning_wlb.distributed.process_groups import (
    NO_GROUPS,
    ProcessGroups,
    group_rank,
    group_size,
)
from tests.ranks import run_ranks


def test_a_rank_alone_shares_nothing() -> None:
    assert NO_GROUPS.of_rows(1) is NO_GROUPS.tensor is None
    assert (group_size(None), group_rank(None)) == (1, 0)


def of_two(rank: int) -> tuple[int, int, bool]:
    pair, both = dist.group.WORLD, dist.new_group([0, 1])
    groups = ProcessGroups(context=pair, merged={2: both})
    right = groups.of_rows(1) is pair and groups.of_rows(2) is both
    return group_size(pair), group_rank(pair), right


def test_merged_micro_batches_have_a_group_of_their_own() -> None:
    assert run_ranks(of_two, 2) == [(2, 0, True), (2, 1, True)]
