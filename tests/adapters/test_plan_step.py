"""``plan_step``: each sequence once, the cap held, equal counts, better than what others do."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.adapters.plan_step import plan_step
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.planning.balanced_step import BalancedStep, _fewest

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=40)


def cost(tokens):
    return 50 * tokens + tokens**2


def rank_works(step: BalancedStep, lengths: list[int]) -> list[float]:
    return [sum(cost(lengths[i]) for each in rank for i in each) for rank in step.micro_batches]


@settings(max_examples=200, deadline=None)
@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 6),
    cap=st.none() | st.integers(100, 300),
    least=st.integers(1, 3),
    lockstep=st.booleans(),
)
def test_each_sequence_once_under_the_cap(lengths, ranks, cap, least, lockstep) -> None:
    given_ = {"ranks": ranks, "max_tokens": cap, "work": cost, "micro_batches": least}
    step = plan_step(lengths, **given_, lockstep=lockstep)
    flat = [i for rank in step.micro_batches for each in rank for i in each]
    assert sorted(flat) == list(range(len(lengths)))
    held = [[sum(lengths[i] for i in each) for each in rank] for rank in step.micro_batches]
    assert held == step.tokens
    assert cap is None or max(map(max, held)) <= cap
    assert min(map(len, held)) >= least
    assert len(set(map(len, held))) == 1
    works = rank_works(step, lengths)
    assert step.balance.imbalance == pytest.approx(max(works) * ranks / sum(works), rel=1e-6)
    assert step == plan_step(lengths, **given_, lockstep=lockstep)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(2, 6), cap=st.none() | st.integers(100, 300))
def test_never_worse_than_what_others_do(lengths, ranks, cap) -> None:
    step = plan_step(lengths, ranks=ranks, max_tokens=cap, work=cost)
    works = np.array([cost(length) for length in lengths])
    longest = np.argsort(-works, kind="stable")
    loads = [0] * ranks
    for each in works[longest]:
        loads[loads.index(min(loads))] += each
    in_turn = np.bincount(np.arange(len(works)) % ranks, weights=works, minlength=ranks)
    blocks = np.bincount(np.arange(len(works)) * ranks // len(works), weights=works)
    most = max(rank_works(step, lengths))
    assert most <= min(max(loads), in_turn.max(), blocks.max())
    assert step.balance.imbalance <= step.balance.imbalance_before * (1 + 1e-9)
    assert step.balance.lockstep_imbalance >= step.balance.imbalance * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(groups=st.integers(1, 12), ranks=st.integers(1, 4), data=st.data())
def test_pairs_stay_together(groups: int, ranks: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=2 * groups, max_size=2 * groups))
    pairs = [(2 * n, 2 * n + 1) for n in range(groups - 1)]
    step = plan_step(lengths, ranks=ranks, max_tokens=100, work=cost, pairs=pairs)
    where = {
        i: (r, k)
        for r, own in enumerate(step.micro_batches)
        for k, each in enumerate(own)
        for i in each
    }
    assert len(where) == len(lengths)
    assert all(where[a] == where[b] for a, b in pairs)


def test_equal_sizes_give_every_rank_as_many_sequences() -> None:
    lengths = np.random.default_rng(0).integers(1, 9000, 64)
    step = plan_step(lengths, ranks=8, model="7b", equal_sizes=True)
    assert [sum(map(len, rank)) for rank in step.micro_batches] == [8] * 8
    assert step.balance.imbalance < 1.02


def test_lockstep_balances_every_micro_batch() -> None:
    lengths = [64, 60, *[10] * 40]
    plain = plan_step(lengths, ranks=4, max_tokens=128, work=cost)
    rows = plan_step(lengths, ranks=4, max_tokens=128, work=cost, lockstep=True)
    assert rows.balance.lockstep_imbalance <= plain.balance.lockstep_imbalance


def test_models_and_work() -> None:
    lengths = np.random.default_rng(1).integers(100, 20_000, 40)
    named = plan_step(lengths, ranks=4, max_tokens=32_768, model="7b")
    shape = TransformerConfig.preset("7b").shape
    assert (
        named.micro_batches
        == plan_step(lengths, ranks=4, max_tokens=32_768, model=shape).micro_batches
    )
    # Without attention work is tokens.
    flat = plan_step(lengths, ranks=4, work=lengths.tolist())
    held = [sum(rank) for rank in flat.tokens]
    assert max(held) * 4 / sum(held) == pytest.approx(flat.balance.imbalance, rel=1e-9)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match="Sequence 1 has 9 tokens, more than max_tokens=8"):
        plan_step([3, 9], max_tokens=8, work=cost)
    with pytest.raises(ValueError, match="Sequence 0 with 2 has 12"):
        plan_step([6, 5, 6], max_tokens=8, work=cost, pairs=[(0, 2)])
    with pytest.raises(ValueError, match="either model="):
        plan_step([3])
    with pytest.raises(ValueError, match=r"lengths=.*at least 1"):
        plan_step([3, 0], work=cost)
    with pytest.raises(ValueError, match="lengths"):
        plan_step([], work=cost)
    with pytest.raises(ValueError, match="one of at least 0 for each"):
        plan_step([3, 4], work=[1.0])
    with pytest.raises(ValueError, match="do not divide by ranks=2"):
        plan_step([3, 4, 5], ranks=2, work=cost, equal_sizes=True)
    with pytest.raises(ValueError, match="one group only"):
        plan_step([3, 4], work=cost, pairs=[(0, 1), (1,)])


def test_the_first_lines_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)[:2]
    with redirect_stdout(io.StringIO()) as said:
        exec(code, {})
    assert said.getvalue() == printed


def test_numbers_of_micro_batches_that_cannot_do_are_not_tried() -> None:
    """3,000 sequences of a third of the cap took 13 s, and 10,000 above half of it ten minutes."""
    home = np.repeat([0, 1], [3000, 10])
    for tokens, fewest in ((5500, 1500), (8300, 3000), (4096, 750)):
        assert _fewest(np.full(3010, tokens), home, 2, 16_384) == fewest
    step = plan_step([5500] * 3000, max_tokens=16_384, model="tiny")
    assert len(step.micro_batches[0]) == 1500


def test_lengths_and_work_without_bounds() -> None:
    for lengths in ([1 << 62], np.array([1 << 63], np.uint64)):
        with pytest.raises(ValueError, match="at most 1,099,511,627,776"):
            plan_step(lengths, model="tiny")
    step = plan_step([3, 4, 5, 6], ranks=2, work=[0, 0, 0, 0], max_tokens=1 << 70)
    assert step.balance.imbalance == 1.0
    assert sorted(map(len, (rank[0] for rank in step.micro_batches))) == [2, 2]
    with pytest.raises(ValueError, match="no group may be empty"):
        plan_step([3, 4], work=[1, 2], pairs=[[]])
