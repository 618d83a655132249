import pytest

from lightning_wlb.schedule.actions import check_schedule
from lightning_wlb.schedule.registry import SCHEDULES, make_program, make_programs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [0, 1, 2, 3, 5, 8, 9, 17])
def test_every_schedule_is_complete_and_free_of_deadlock(schedule, ranks, micro_batches):
    check_schedule(make_programs(schedule, ranks, micro_batches), micro_batches)


def test_a_program_is_one_of_the_programs():
    for schedule in SCHEDULES:
        programs = make_programs(schedule, 3, 4)
        assert programs == [make_program(schedule, rank, 3, 4) for rank in range(3)]
        assert len({tuple(program) for program in programs}) == 3


def test_an_unknown_schedule_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'zero-bubble': choose one of 1f1b, gpipe, interleaved"):
        make_program("zero-bubble", 0, 2, 4)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_schedules_of_whole_stages_refuse_several_per_rank(schedule):
    with pytest.raises(ValueError, match=f"'{schedule}' runs one stage per rank, not 2"):
        make_program(schedule, 0, 2, 4, stages_per_rank=2)


def test_a_rank_runs_at_least_one_stage():
    with pytest.raises(ValueError, match="stages_per_rank=0"):
        make_program("interleaved", 0, 2, 4, stages_per_rank=0)
