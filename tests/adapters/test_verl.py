"""verl's functions replaced: same signatures, same answers' form, never worse than its own."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.adapters.verl import get_seqlen_balanced_partitions, work_of_verl
from tests.ranks import run_ranks


def theirs():
    """verl's module, or a skip."""
    return pytest.importorskip("verl.utils.seqlen_balancing", reason="verl", exc_type=ImportError)


def batch_of(lengths):
    from tensordict import TensorDict

    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    numbers = torch.arange(len(lengths))[:, None].expand(-1, max(lengths))
    fields = {"input_ids": numbers.clone(), "attention_mask": mask.long()}
    return TensorDict(fields, batch_size=[len(lengths)])


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(1, 10**6), min_size=1, max_size=32),
    parts=st.integers(1, 4),
    equal=st.booleans(),
)
def test_partitions_have_each_item_once(values, parts, equal) -> None:
    values = values * parts if equal else values + [1] * parts
    found = get_seqlen_balanced_partitions(values, parts, equal)
    assert sorted(i for part in found for i in part) == list(range(len(values)))
    assert all(part == sorted(part) and part for part in found)
    if equal:
        assert len(set(map(len, found))) == 1


def test_partitions_are_never_worse_than_verls() -> None:
    module = theirs()
    generator = np.random.default_rng(0)
    for trial in range(60):
        parts = int(generator.integers(2, 9))
        count = parts * int(generator.integers(1, 12))
        values = work_of_verl(np.exp(generator.normal(6, 1.3, count)).astype(int) + 1).tolist()
        most = [
            max(sum(values[i] for i in part) for part in deal(values, parts, bool(trial % 2)))
            for deal in (get_seqlen_balanced_partitions, module.get_seqlen_balanced_partitions)
        ]
        assert most[0] <= most[1]


def test_the_signatures_are_verls() -> None:
    module = theirs()
    from lightning_wlb.adapters import verl

    for name in ("get_seqlen_balanced_partitions", "rearrange_micro_batches"):
        own = inspect.signature(getattr(verl, name)).parameters
        asked = inspect.signature(getattr(module, name)).parameters
        assert list(own)[: len(asked)] == list(asked)
        assert [own[each].default for each in asked] == [asked[each].default for each in asked]


def test_micro_batches_hold_the_cap_and_their_rows() -> None:
    module = theirs()
    from lightning_wlb.adapters.verl import rearrange_micro_batches

    generator = np.random.default_rng(1)
    for group in (1, 2):
        lengths = generator.integers(1, 60, 24).tolist()
        batch = batch_of(lengths)
        given_ = {"max_token_len": 150, "force_group_size": group, "num_batches_divided_by": 2}
        own, rows = rearrange_micro_batches(batch, **given_)
        their_rows = module.rearrange_micro_batches(batch, **given_)[1]
        assert sorted(i for each in rows for i in each) == list(range(24))
        assert len(rows) % 2 == 0
        assert len(rows) <= len(their_rows)
        assert max(sum(lengths[i] for i in each) for each in rows) <= 150
        assert all(i + 1 in each for each in rows for i in each if group == 2 and i % 2 == 0)
        for micro_batch, each in zip(own, rows, strict=True):
            assert micro_batch["input_ids"][:, 0].tolist() == each
    with pytest.raises(ValueError, match="more than max_token_len=20"):
        rearrange_micro_batches(batch, 20)


def rearranged(rank: int) -> tuple[int, str]:
    from lightning_wlb.adapters.verl import rearrange_micro_batches

    lengths = [[10] * 8, [40] * 8][rank]
    rows = rearrange_micro_batches(batch_of(lengths), 80, dp_group=dist.group.WORLD)[1]
    try:
        rearrange_micro_batches(batch_of(lengths), 30, dp_group=dist.group.WORLD)
    except ValueError as error:
        return len(rows), str(error)
    return len(rows), ""


def test_ranks_agree_on_a_number_and_on_a_refusal() -> None:
    theirs()
    for count, refusal in run_ranks(rearranged, 2):
        assert count == 4
        assert "has 40 tokens, more than max_token_len=30" in refusal


class Rows(dict):
    """What is asked of a TensorDict, without verl and tensordict."""


def refused(rank: int) -> str:
    module = ModuleType("verl.utils")
    module.tensordict_utils = None
    sys.modules |= {"verl": ModuleType("verl"), "verl.utils": module}
    from lightning_wlb.adapters.verl import rearrange_micro_batches

    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[0] *= 1 - rank  # on rank 1 a row without tokens
    batch = Rows(input_ids=torch.zeros(4, 6), attention_mask=mask)
    said = []
    for rows in (batch, Rows({name: each[: 4 * rank] for name, each in batch.items()})):
        try:
            rearrange_micro_batches(rows, 12, dp_group=dist.group.WORLD)
        except ValueError as error:
            said.append(str(error))
    return " ".join(said)


def test_rows_that_one_rank_cannot_use_end_all_ranks() -> None:
    """A row without tokens, and no rows at all: the other ranks would wait for ever."""
    for said in run_ranks(refused, 2, timeout=60):
        assert said.count("some rank has no rows, a row without tokens") == 2
