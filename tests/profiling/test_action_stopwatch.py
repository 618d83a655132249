"""The stopwatch of a CUDA device: events on the stream, read once. (CPU: tests/strategy.)"""

from __future__ import annotations

import pytest
import torch

from lightning_wlb.profiling.action_stopwatch import Stopwatch
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_measure_the_device_and_not_the_launch() -> None:
    """The host returns from every call at once; the device is kept busy by a kernel that waits."""
    stopwatch = Stopwatch(torch.device("cuda"))
    cycles = 50_000_000  # some tens of milliseconds at the clock of any GPU
    torch.cuda._sleep(cycles)  # the first call loads it
    stopwatch.begin_step()
    with stopwatch.action(Action(0, FORWARD, 0)):
        torch.cuda._sleep(cycles)
    with stopwatch.action(Action(0, BACKWARD, 0)):
        torch.cuda._sleep(cycles)
        stopwatch.start()
        torch.cuda._sleep(cycles)
        stopwatch.stop()
    one, two = stopwatch.timings()
    assert one.wall == one.compute > 5e-3
    assert two.wall == pytest.approx(2 * one.wall, rel=0.2)
    assert two.attention == pytest.approx(one.wall, rel=0.2)
    assert one.attention == 0
    assert two.begin == pytest.approx(one.begin + one.wall, rel=0.1)
