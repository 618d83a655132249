"""The flat form of a parameter, and what a rank alone need not copy."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.schedule.actions import FORWARD, Action
from lightning_wlb.training.sharded_parameters import chunks_of
from tests.ranks import run_ranks
from tests.training.test_gather_and_reduce import gathered, inputs, run, toy


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 5), st.data())
def test_a_gradient_is_cut_as_torch_cuts_a_tensor(shape, ranks, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    gradient = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 1
    chunks = gradient.chunk(ranks, dim)
    place = torch.zeros(ranks, *chunks[0].shape, dtype=torch.float64)
    for part, at in chunks_of(gradient, place, dim):
        at.copy_(part)
    for rank in range(ranks):
        rows = chunks[rank].shape[dim] if rank < len(chunks) else 0
        assert torch.count_nonzero(place[rank].narrow(dim, rows, place.shape[1 + dim] - rows)) == 0
        if rows:
            assert torch.equal(place[rank].narrow(dim, 0, rows), chunks[rank])


def alone(rank: int) -> list[bool]:
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        model = toy(torch.float64)
        buckets = gathered(model, dtype)
        sharded = {name: p.to_local().data_ptr() for name, p in model.named_parameters()}
        with torch.no_grad(), buckets.step([Action(0, FORWARD, 0)]):
            for each in buckets._in_step:
                each.wait()
            live = {name: p.data_ptr() for name, p in model.named_parameters()}
        found.append(live == sharded)
    run(model, buckets, inputs(0, 1, torch.bfloat16))
    buckets.finish()
    found.append(all(p.grad.dtype == torch.float64 for p in model.parameters()))
    return found


def test_a_rank_alone_copies_only_to_another_dtype():
    assert run_ranks(alone, 1) == [[True, False, True]]
