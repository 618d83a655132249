"""Balanced batches for any loader: what each rank gets, epochs, positions, Accelerate's dealing."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

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


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_resumes_where_it_stood(workers: int) -> None:
    def loader() -> StatefulDataLoader:
        sampler = BalancedBatchSampler(LENGTHS, rank=1, **GIVEN)
        return StatefulDataLoader(
            range(50), batch_sampler=sampler, collate_fn=list, num_workers=workers
        )

    whole = list(loader())
    first = loader()
    source = iter(first)
    for _ in range(5):
        next(source)
    state = first.state_dict()
    again = loader()
    again.load_state_dict(state)
    assert list(again) == whole[5:]


def test_accelerate_deals_a_batch_to_each_process() -> None:
    accelerate = pytest.importorskip("accelerate")
    shards = [
        accelerate.data_loader.BatchSamplerShard(
            BalancedBatchSampler(LENGTHS, **GIVEN), num_processes=2, process_index=rank
        )
        for rank in range(2)
    ]
    for rank, shard in enumerate(shards):
        expected = list(BalancedBatchSampler(LENGTHS, rank=rank, **GIVEN))
        assert list(DataLoader(range(50), batch_sampler=shard, collate_fn=list)) == expected


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
