"""Timers, on a simulated device that runs what a host queues."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_wlb.profiling import call_timer as timing
from lightning_wlb.profiling.call_timer import FIRST_SLEEP, LONGEST_SLEEP, CPUTimer, CUDATimer

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

        def synchronize() -> None:
            self.now = max(self.now, event.at)
            self.log.append("wait")

        event.record, event.synchronize = record, synchronize
        event.query = lambda: event.at <= self.now
        event.elapsed_time = lambda end: 1000 * (end.at - event.at)
        return event


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Device]:
    def make(launch: float) -> Device:
        device = Device(launch)
        monkeypatch.setattr(torch.cuda, "_sleep", device.sleep)
        monkeypatch.setattr(torch.cuda, "Event", device.event)
        clock = SimpleNamespace(perf_counter=lambda: device.now)
        monkeypatch.setattr(timing, "time", clock)
        return device

    return make


def test_the_device_sleeps_before_the_first_event_and_the_calls_share_the_interval(
    cuda: Callable[[float], Device],
) -> None:
    device = cuda(LAUNCH)
    seconds, result = CUDATimer().seconds(lambda: device.run(2e-6, "call"), times=3)
    assert result is None
    assert device.log == ["sleep", "event", "event", "call", "call", "call", "event", "wait"]
    # Each takes less on the device than the host needs to queue it.
    assert seconds == pytest.approx(2e-6)


def test_a_sample_that_the_host_was_too_slow_for_is_dropped_and_the_next_sleep_is_longer(
    cuda: Callable[[float], Device],
) -> None:
    device = cuda(400e-6)  # two calls take longer to queue than the first sleep lasts
    timer = CUDATimer()
    seconds, _ = timer.seconds(lambda: device.run(2e-6, "call"), times=2)
    assert device.log.count("sleep") == 2
    assert seconds == pytest.approx(2e-6)
    with timer.held() as held:
        device.run(1e-6, "call")
    assert held.ahead  # at once, by the sleep that was long enough
    assert held.seconds == pytest.approx(400e-6)


def test_a_call_that_no_sleep_is_long_enough_for_counts_as_it_is(
    cuda: Callable[[float], Device],
) -> None:
    device = cuda(1.0)
    timer = CUDATimer()
    seconds, _ = timer.seconds(lambda: device.run(2e-6, "call"))
    assert device.log.count("sleep") == 1 + (LONGEST_SLEEP // FIRST_SLEEP).bit_length() - 1
    assert seconds == pytest.approx(1.0 + 2e-6 - LONGEST_SLEEP * CYCLE)
    with timer.held() as held:
        device.run(2e-6, "call")
    assert held.ahead
    assert held.seconds == 0.0  # it may have waited for the device


@pytest.mark.parametrize(("seconds", "times"), [(0.0, 20), (2e-6, 20), (300e-6, 4), (0.2, 1)])
def test_calls_fill_an_interval(seconds: float, times: int) -> None:
    assert CUDATimer().times(seconds) == times
    assert CPUTimer().times(seconds) == 1


def test_medians_of_short_calls_are_of_many_of_each_pass(cuda: Callable[[float], Device]) -> None:
    device = cuda(LAUNCH)
    outs: list[str] = []

    def backward(out: str) -> None:
        outs.append(out)
        device.run(500e-6, "backward")

    def forward() -> str:
        device.run(10e-6, "forward")
        return "out"

    medians = CUDATimer().medians(forward, backward, repeats=4)
    assert medians == pytest.approx(np.array((10e-6, 500e-6)))
    # Two warm up with a call each, then as many as fill a millisecond: 20 and 2.
    samples = (device.log.count("sleep") - 4) // 2
    assert samples >= 4
    assert device.log.count("forward") == 2 + 20 * samples
    assert device.log.count("backward") == 2 + 2 * samples
    assert set(outs) == {"out"}


def test_a_cpu_timer_reads_its_thread_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter((1.0, 7.0))
    clock = SimpleNamespace(thread_time=lambda: next(readings))
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert CPUTimer().seconds(lambda: "done", times=3) == (2.0, "done")
    with CPUTimer().held() as held:
        pass
    assert (held.seconds, held.ahead) == (0.0, True)


def test_long_calls_are_sampled_less_and_short_ones_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for each, samples in ((0.4, 3), (0.003, 6), (1e-5, 20)):
        now = [0.0]
        calls = [0]

        def call(each: float = each, now: list[float] = now, calls: list[int] = calls) -> None:
            now[0] += each
            calls[0] += 1

        clock = SimpleNamespace(thread_time=lambda now=now: now[0])
        monkeypatch.setattr(timing, "time", clock)
        CPUTimer().medians(call, lambda out: None, repeats=6)
        assert calls[0] == 1 + samples
