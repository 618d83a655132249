import pytest

from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.programs import make_programs
from tests.schedule.proof import check_schedule
from tests.schedule.support import format_program


def interleaved(rank, ranks, micro_batches, virtual_stages):
    return make_programs("interleaved", ranks, micro_batches, virtual_stages)[rank]


def test_interleaved_of_the_textbook():
    assert [format_program(interleaved(rank, 2, 4, 2)) for rank in range(2)] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_micro_batches_that_do_not_divide_by_the_ranks():
    """Five on two ranks: rounds of three and two, so that no round is smaller than the ring."""
    forwards = [action for action in interleaved(1, 2, 5, 2) if action.kind == "F"]
    assert format_program(forwards) == "1F0 1F1 1F2 3F0 3F1 3F2 1F3 1F4 3F3 3F4"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("virtual_stages", [1, 2, 3, 4])
def test_no_deadlock_whatever_the_micro_batches(ranks, virtual_stages):
    for micro_batches in [*range(3 * ranks + 2), 5 * ranks + 1]:
        programs = [
            interleaved(rank, ranks, micro_batches, virtual_stages) for rank in range(ranks)
        ]
        check_schedule(programs, micro_batches, virtual_stages)


@pytest.mark.parametrize("micro_batches", [15, 17, 31, 64])
def test_no_deadlock_on_sixteen_ranks(micro_batches):
    programs = [interleaved(rank, 16, micro_batches, 2) for rank in range(16)]
    check_schedule(programs, micro_batches, 2)


@pytest.mark.parametrize(("micro_batches", "largest"), [(4, 4), (8, 4), (9, 5), (11, 6), (64, 4)])
def test_open_stage_passes_are_bounded_by_the_warm_up(micro_batches, largest):
    ranks, virtual_stages = 4, 3
    for rank in range(ranks):
        opened, most = 0, 0
        for action in interleaved(rank, ranks, micro_batches, virtual_stages):
            opened += 1 if action.kind == "F" else -1
            most = max(most, opened)
        warm_up = 2 * (ranks - 1 - rank) + (virtual_stages - 1) * largest
        assert most == min(micro_batches * virtual_stages, warm_up + 1)


def test_a_short_last_round_would_deadlock():
    """Why the rounds are as equal as possible: Megatron's order for nine on eight ranks."""

    def megatron(rank):
        rounds = [range(8), range(8, 9)]
        forward = [Action(s * 8 + rank, "F", m) for each in rounds for s in (0, 1) for m in each]
        backward = [Action(s * 8 + rank, "B", m) for each in rounds for s in (1, 0) for m in each]
        warm_up = min(18, 2 * (7 - rank) + 8)
        steady = [
            action for pair in zip(forward[warm_up:], backward, strict=False) for action in pair
        ]
        return forward[:warm_up] + steady + backward[18 - warm_up :]

    with pytest.raises(ValueError, match="deadlocks: rank 0 waits for the message that 8F8 needs"):
        check_schedule([megatron(rank) for rank in range(8)], 9, 2)
