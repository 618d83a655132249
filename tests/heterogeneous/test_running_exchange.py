"""Exchanges on their way: calls beside a step, groups, and what fails there."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_wlb.heterogeneous import running_exchange
from lightning_wlb.heterogeneous.running_exchange import Forwarder, exchange_groups
from lightning_wlb.supervision.progress import PROGRESS


def test_calls_are_made_in_order_in_a_thread_that_ends_with_the_relay() -> None:
    forwarder, made, may = Forwarder(None), [], threading.Event()
    before = threading.active_count()

    def call(number: int) -> int:
        may.wait(10)
        assert not torch.is_grad_enabled()
        made.append(number)
        return number

    results = [forwarder.submit(lambda n=n: call(n)) for n in range(3)]
    assert made == [], "nobody waits for them"
    may.set()
    forwarder.settle()
    assert made == [each.result() for each in results] == [0, 1, 2]
    del forwarder
    for _ in range(100):
        if threading.active_count() < before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before - 1


def test_where_a_device_waits_calls_are_made_at_once_on_a_stream_of_its_own(monkeypatch) -> None:
    """As under NCCL, where a wait holds up no thread."""
    streams, now = [], []

    @contextmanager
    def on(stream):
        now.append(stream)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(device) or device)
    monkeypatch.setattr(torch.cuda, "stream", on)
    before, device = threading.active_count(), torch.device("cuda", 1)
    forwarder = Forwarder(device)
    made = forwarder.submit(lambda: (list(now), torch.is_grad_enabled()))
    assert made.done()
    assert made.result() == ([device], False)
    assert (streams, now, threading.active_count()) == ([device], [], before)
    with pytest.raises(ZeroDivisionError):
        forwarder.submit(lambda: 1 // 0)
    forwarder.settle()


def test_no_call_is_made_after_one_that_failed() -> None:
    forwarder, made = Forwarder(None), []
    results = [forwarder.submit(lambda: 1 // 0), forwarder.submit(lambda: made.append(1))]
    for each in results:
        with pytest.raises(ZeroDivisionError):
            each.result()
    with pytest.raises(ZeroDivisionError):
        forwarder.settle()
    assert made == []
    assert PROGRESS.failed == "ZeroDivisionError: integer division or modulo by zero"
    PROGRESS.begin()
    assert PROGRESS.failed == ""


def test_all_who_exchange_have_met_before_a_step(monkeypatch) -> None:
    """NCCL connects two ranks when something first travels between them, and holds both up."""
    met = []

    def meet(into, out, counts, of, *, group):
        assert into.shape == out.shape
        met.append((counts, of, group.ranks))

    def own(sets, rank, timeout):
        ranks = next(each for each in sets if rank in each)
        return SimpleNamespace(ranks=ranks, size=lambda: len(ranks))

    monkeypatch.setattr(running_exchange, "own_group", own)
    monkeypatch.setattr(dist, "all_to_all_single", meet)
    assert set(exchange_groups(5, 8, 8, None).made) == {range(8)}
    assert met == [([1] * 8, [1] * 8, range(8))]
    met.clear()
    rail, node = range(1, 8, 4), range(4, 8)
    assert set(exchange_groups(5, 8, 4, None).made) == {rail, node}
    assert met == [([1] * 2, [1] * 2, rail), ([1] * 4, [1] * 4, node)]
