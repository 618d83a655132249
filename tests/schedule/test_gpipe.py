from lightning_wlb.schedule.actions import format_program
from lightning_wlb.schedule.gpipe import gpipe


def test_all_forwards_then_all_backwards():
    assert [format_program(gpipe(stage, 2, 3)) for stage in range(2)] == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
    ]
