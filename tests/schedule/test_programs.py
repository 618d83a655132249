import pytest

from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice
from lightning_wlb.schedule.programs import SCHEDULES, check_stages, program_of
from tests.schedule.proof import check_replicas, check_schedule
from tests.schedule.support import format_program, make_programs, meetings_of, sharers_of


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_schedule_is_complete_and_free_of_deadlock(schedule, ranks):
    for stages in (1, 2, 4) if SCHEDULES[schedule].virtual_stages else (1,):
        for micro_batches in [*range(3 * ranks + 2), 5 * ranks + 1]:
            check_schedule(
                make_programs(schedule, ranks, micro_batches, stages), micro_batches, stages
            )


def test_an_unknown_schedule_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="is not one of 1f1b, interleaved"):
        check_stages("zero-bubble", 1)


def test_1f1b_refuses_several_stages_per_rank():
    with pytest.raises(ValueError, match="'1f1b' runs one stage a rank, not 2"):
        check_stages("1f1b", 2)


def replica_of(*chains, shared=(0,), number=0):
    """Chains of slices, one for each micro-batch; the first chain belongs to ``shared``."""
    slices, forward = [], []
    for at, length in enumerate(chains):
        members = shared if at == 0 else (number,)
        document = 0 if len(members) > 1 else 10 * (number + 1) + at
        for part in range(length):
            forward.append(MicroBatch((len(slices),), "per_document", 1, members))
            slices.append(Slice(document, 0, part, part + 1))
    return ReplicaPlan(tuple(slices), tuple(forward))


@pytest.mark.parametrize(
    ("schedule", "virtual_stages"),
    [("1f1b", 1), ("interleaved", 1), ("interleaved", 2)],
)
def test_whole_pieces_run_the_schedule(schedule, virtual_stages):
    replicas = [replica_of(1, 1, 1)]
    programs = make_programs(schedule, 2, 3, virtual_stages)
    assert program_of(schedule, 1, 2, virtual_stages, replicas, 0) == programs[1]


def test_slices_run_packflow():
    program = program_of("1f1b", 0, 1, 1, [replica_of(2, 1)], 0)
    assert format_program(program) == "0F0 0F1 0B1 0B0 0F2 0B2"


def test_a_replica_without_slices_follows_those_that_it_meets():
    """Alone it would run B0 before F1; the other one shares two micro-batches and has a chain."""
    pair = (0, 1)
    second = MicroBatch((1,), "per_document", 1, pair)

    def with_two(rest):
        slices = (Slice(0, 0, 0, 1), Slice(1, 0, 0, 1), *rest.slices)
        first = MicroBatch((0,), "per_document", 1, pair)
        own = tuple(
            MicroBatch((each.slices[0] + 2,), "per_document", 1, each.replicas)
            for each in rest.forward
        )
        forward = (first, second, *own)
        return ReplicaPlan(slices, forward)

    replicas = [
        with_two(replica_of(1, shared=(0,))),
        with_two(replica_of(3, shared=(1,), number=1)),
    ]
    assert replicas[0].slices[2].context == 0
    programs = [[program_of("1f1b", 0, 1, 1, replicas, number)] for number in (0, 1)]
    check_replicas(programs, [3, 5], shared=meetings_of(sharers_of(replicas)))
    assert format_program(programs[0][0]) == "0F0 0F1 0F2 0B0 0B1 0B2"
    with pytest.raises(ValueError, match="one stage per pipeline rank, not 2"):
        program_of("interleaved", 0, 2, 2, replicas, 0)
