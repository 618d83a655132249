import pytest

from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice, symmetric_backward
from lightning_wlb.schedule.actions import check_replicas, format_program
from lightning_wlb.schedule.programs import meetings_of, program_of
from lightning_wlb.schedule.registry import make_program


def replica_of(*chains, shared=(0,), number=0):
    """Chains of slices, one for each micro-batch; the first chain belongs to ``shared``."""
    slices, forward = [], []
    for at, length in enumerate(chains):
        members = shared if at == 0 else (number,)
        document = 0 if len(members) > 1 else 10 * (number + 1) + at
        for part in range(length):
            forward.append(MicroBatch((len(slices),), "per_document", 1, members))
            slices.append(Slice(document, 0, part, part + 1))
    return ReplicaPlan(tuple(slices), tuple(forward), symmetric_backward(slices, forward))


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_whole_pieces_run_the_schedule(schedule, per_rank):
    replicas = [replica_of(1, 1, 1)]
    assert program_of(schedule, 1, 2, per_rank, replicas, 0) == make_program(
        schedule, 1, 2, 3, per_rank
    )


def test_slices_run_packflow():
    program = program_of("1f1b", 0, 1, 1, [replica_of(2, 1)], 0)
    assert format_program(program) == "0F0 0F1 0B1 0B0 0F2 0B2"
    with pytest.raises(ValueError, match="schedule='gpipe' does not run"):
        program_of("gpipe", 0, 1, 1, [replica_of(2, 1)], 0)


def test_a_replica_without_slices_follows_those_that_it_meets():
    """Alone it would run B0 before F1; the other one shares two micro-batches and has a chain."""
    pair = (0, 1)
    second = MicroBatch((1,), "per_document", 1, pair)

    def with_two(rest):
        slices = (Slice(0, 0, 0, 1), Slice(1, 0, 0, 1), *rest.slices)
        first = MicroBatch((0,), "per_document", 1, pair)
        own = tuple(
            MicroBatch((group.slices[0] + 2,), "per_document", 1, group.replicas)
            for group in rest.forward
        )
        forward = (first, second, *own)
        return ReplicaPlan(slices, forward, symmetric_backward(slices, forward))

    replicas = [
        with_two(replica_of(1, shared=(0,))),
        with_two(replica_of(3, shared=(1,), number=1)),
    ]
    assert replicas[0].slices[2].context == 0
    programs = [[program_of("1f1b", 0, 1, 1, replicas, number)] for number in (0, 1)]
    check_replicas(programs, [3, 5], shared=meetings_of(replicas))
    assert format_program(programs[0][0]) == "0F0 0F1 0F2 0B0 0B1 0B2"
    with pytest.raises(ValueError, match="one stage per pipeline rank, not 2"):
        program_of("interleaved", 0, 2, 2, replicas, 0)


def test_where_replicas_meet():
    alone = [replica_of(1, 1), replica_of(1, number=1, shared=(1,))]
    assert meetings_of(alone) is None
    together = [replica_of(1, 1, shared=(0, 1)), replica_of(1, shared=(0, 1), number=1)]
    name = meetings_of(together)
    first, second = (program_of("1f1b", 0, 1, 1, together, number) for number in (0, 1))
    assert name(0, first[0]) == name(1, second[0]) is not None
    assert name(0, first[0]) != name(0, first[1])
    assert name(0, first[-1]) is None
