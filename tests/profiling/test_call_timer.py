"""Timers, on a simulated device that runs what a host queues."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_wlb.profiling import action_stopwatch
from lightning_wlb.profiling import call_timer as timing
from lightning_wlb.profiling.call_timer import CallTimer

CUDA = torch.device("cuda")
CYCLE = 0.5e-9
LAUNCH = 5e-6


class Device:
    """One stream, in seconds of simulated time; everything that the host does is logged."""

    def __init__(self, launch: float = LAUNCH) -> None:
        self.now = 0.0  # the host's clock
        self.free = 0.0  # when the device has done all that is queued
        self.launch = launch
        self.log: list[str] = []

    def run(self, seconds: float, name: str) -> None:
        self.now += self.launch
        self.free = max(self.free, self.now) + seconds
        self.log.append(name)

    def sleep(self, cycles: int) -> None:
        self.run(cycles * CYCLE, "sleep")

    def event(self, enable_timing: bool = False) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0)

        def record() -> None:
            event.at = max(self.free, self.now)
            self.log.append("event")

        event.record = record
        event.query = lambda: event.at <= self.now
        event.elapsed_time = lambda end: 1000 * (end.at - event.at)
        return event

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)
        self.log.append("wait")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Device]:
    def make(launch: float) -> Device:
        device = Device(launch)
        monkeypatch.setattr(torch.cuda, "_sleep", device.sleep)
        monkeypatch.setattr(torch.cuda, "Event", device.event)
        monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
        clock = SimpleNamespace(perf_counter=lambda: device.now)
        monkeypatch.setattr(timing, "time", clock)
        return device

    return make


def test_the_device_sleeps_before_the_first_event_and_the_calls_share_the_interval(
    cuda: Callable[[float], Device],
) -> None:
    device = cuda(LAUNCH)
    seconds, result = CallTimer(CUDA).seconds(lambda: device.run(2e-6, "call"), times=3)
    assert result is None
    assert device.log == ["sleep", "event", "event", "call", "call", "call", "event", "wait"]
    # Each takes less on the device than the host needs to queue it.
    assert seconds == pytest.approx(2e-6)


def test_a_sample_that_the_host_was_too_slow_for_is_dropped_and_the_next_sleep_is_longer(
    cuda: Callable[[float], Device],
) -> None:
    device = cuda(400e-6)  # two calls take longer to queue than the first sleep lasts
    timer = CallTimer(CUDA)
    seconds, _ = timer.seconds(lambda: device.run(2e-6, "call"), times=2)
    assert device.log.count("sleep") == 2
    assert seconds == pytest.approx(2e-6)
    with timer.held() as held:
        device.run(1e-6, "call")
    assert held.ahead  # at once, by the sleep that was long enough
    assert held.seconds == pytest.approx(400e-6)


def test_medians_of_short_calls_are_of_many_of_each_pass(cuda: Callable[[float], Device]) -> None:
    device = cuda(LAUNCH)
    outs: list[str] = []

    def backward(out: str) -> None:
        outs.append(out)
        device.run(500e-6, "backward")

    def forward() -> str:
        device.run(10e-6, "forward")
        return "out"

    medians = CallTimer(CUDA).medians(forward, backward, repeats=4)
    assert medians == pytest.approx(np.array((10e-6, 500e-6)))
    # Two warm up with a call each, then as many as fill a millisecond: 20 and 2.
    samples = (device.log.count("sleep") - 4) // 2
    assert samples >= 4
    assert device.log.count("forward") == 2 + 20 * samples
    assert device.log.count("backward") == 2 + 2 * samples
    assert set(outs) == {"out"}


def test_a_cpu_timer_reads_its_thread_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter((1.0, 7.0))
    clock = SimpleNamespace(thread_time=lambda: next(readings), perf_counter=lambda: 0.0)
    monkeypatch.setattr(action_stopwatch, "time", clock)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    timer = CallTimer(torch.device("cpu"))
    assert timer.seconds(lambda: "done", times=3) == (2.0, "done")
    with timer.held() as held:
        pass
    assert (held.seconds, held.ahead) == (0.0, True)
