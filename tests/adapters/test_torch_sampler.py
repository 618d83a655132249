"""Balanced batches for any loader: what each rank gets, epochs, positions, what is refused."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from lightning_wlb.adapters.torch_sampler import BalancedBatchSampler

LENGTHS = np.random.default_rng(0).integers(1, 500, 50)
GIVEN = {"sequences": 12, "ranks": 2, "micro_batches": 3, "model": "tiny"}


def test_ranks_share_a_step_and_epochs_differ() -> None:
    own = [list(BalancedBatchSampler(LENGTHS, rank=rank, **GIVEN)) for rank in range(2)]
    every = BalancedBatchSampler(LENGTHS, **GIVEN)
    in_turn = list(every)
    assert in_turn[0::2] == own[0]
    assert in_turn[1::2] == own[1]
    assert len(in_turn) == 4 * 3 * 2 == len(every)
    assert all(in_turn)
    names = [i for each in in_turn for i in each]
    assert len(set(names)) == len(names) == 48
    # An epoch's batches are a plain shuffle's sequences, step by step.
    order = np.random.default_rng((0, 0)).permutation(50)
    assert sorted(i for each in in_turn[:6] for i in each) == sorted(order[:12].tolist())
    assert list(every) != in_turn  # the next epoch
    every.set_epoch(0)
    assert list(every) == in_turn


@pytest.mark.parametrize("rank", [None, 0])
def test_behind_a_step_other_ranks_and_micro_batches_go_on(rank: int | None) -> None:
    given = {"sequences": 12, "model": "tiny", "rank": rank}

    def steps(sampler: BalancedBatchSampler) -> list[list[int]]:
        """The sequences of each step that is left."""
        batches, size = list(sampler), len(sampler) // 4
        assert len(batches) % size == 0
        return [sorted(chain(*batches[at : at + size])) for at in range(0, len(batches), size)]

    sampler = BalancedBatchSampler(LENGTHS, ranks=2 if rank is None else 1, **given)
    source = iter(sampler)
    every = [next(source) for _ in range(len(sampler) // 2)]
    for other in ({"ranks": 4}, {"ranks": 1, "micro_batches": 3}):
        resumed = BalancedBatchSampler(LENGTHS, **given | other)
        resumed.load_state_dict(sampler.state_dict())
        rest = steps(resumed)
        assert rest == steps(BalancedBatchSampler(LENGTHS, **given | other))[2:]
        assert rank is not None or not {*chain(*rest)} & {*chain(*every)}
    for other in (LENGTHS + 1, {"sequences": 13}, {"seed": 1}, {"shuffle": False}):
        mine, options = (LENGTHS, other) if isinstance(other, dict) else (other, {})
        another = BalancedBatchSampler(mine, ranks=1, **given | options)
        with pytest.raises(ValueError, match="Sequences would be lost or repeated"):
            another.load_state_dict(sampler.state_dict())
    within = BalancedBatchSampler(LENGTHS, ranks=1, micro_batches=3, **given)
    next(iter(within))
    with pytest.raises(ValueError, match=r"1 of 3 batches of step 0, .*'a_step': 3.*: 2,"):
        BalancedBatchSampler(LENGTHS, ranks=1, micro_batches=2, **given).load_state_dict(
            within.state_dict()
        )
    # As many batches to a step, but other sequences in them.
    more = BalancedBatchSampler(LENGTHS, ranks=2, micro_batches=3, **given | {"rank": 0})
    next(iter(more))
    with pytest.raises(ValueError, match=r"'a_step': 3, 'step': .*: 3, 'step': "):
        BalancedBatchSampler(
            LENGTHS, ranks=4, micro_batches=3, **given | {"rank": 0}
        ).load_state_dict(more.state_dict())


def test_inside_of_a_step_the_plan_must_be_the_same() -> None:
    given = {"sequences": 12, "ranks": 1, "rank": 0, "micro_batches": 4, "max_tokens": 3000}
    sampler = BalancedBatchSampler(LENGTHS, model="tiny", **given)
    next(iter(sampler))
    state = sampler.state_dict()
    BalancedBatchSampler(LENGTHS, model="tiny", **given).load_state_dict(state)
    for other in ({"model": "7b"}, {"work": lambda tokens: tokens**3}):
        resumed = BalancedBatchSampler(LENGTHS, **given, **other)
        assert next(resumed.steps()) != next(sampler.steps())
        with pytest.raises(ValueError, match="Sequences would be lost or repeated"):
            resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="'step': '"):
        sampler.load_state_dict({**state, "batches": 4001, "a_step": 4})


def test_work_by_a_list_is_refused() -> None:
    with pytest.raises(ValueError, match=r"work= is a list, .* give a function"):
        BalancedBatchSampler([4] * 12, sequences=6, ranks=2, work=[1.0] * 12)


def test_its_own_state_and_what_is_refused() -> None:
    sampler = BalancedBatchSampler(LENGTHS, rank=0, **GIVEN)
    source = iter(sampler)
    taken = [next(source) for _ in range(4)]
    other = BalancedBatchSampler(LENGTHS, rank=0, **GIVEN)
    other.load_state_dict(sampler.state_dict())
    assert taken + list(other) == list(BalancedBatchSampler(LENGTHS, rank=0, **GIVEN))
    with pytest.raises(ValueError, match="on a rank, more than micro_batches=3"):
        next(iter(BalancedBatchSampler(LENGTHS, max_tokens=500, **GIVEN)))
    with pytest.raises(ValueError, match="ranks count from 0"):
        BalancedBatchSampler(LENGTHS, rank=2, **GIVEN)
    for made_up in ({"epoch": -1, "batches": 0}, {"epoch": 0, "batches": True}):
        with pytest.raises(ValueError, match=r"(epoch=-1|batches=True)"):
            other.load_state_dict(made_up)
    with pytest.raises(ValueError, match="epoch=-1"):
        other.set_epoch(-1)
    with pytest.raises(ValueError, match="sequences=5"):
        BalancedBatchSampler(LENGTHS, **GIVEN | {"sequences": 5})
