"""What is set for CUDA before it starts, and what the user has set stays."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.training import cuda_settings
from lightning_wlb.training.cuda_settings import has_expandable_segments, prepare_cuda
from tests.strategy.harness import trainer

CONNECTIONS, ALLOCATOR = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF"
BEFORE = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is set, on Linux; returns the warnings to come."""
    warnings: list[str] = []
    for name in (CONNECTIONS, ALLOCATOR, BEFORE):
        monkeypatch.setenv(name, "")  # so that it is as it was, afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(cuda_settings, "rank_zero_warn", warnings.append)
    return warnings


def settings() -> tuple[str | None, str | None]:
    return os.environ.get(CONNECTIONS), os.environ.get(ALLOCATOR)


@pytest.mark.parametrize(
    ("ranks", "system", "connections", "segments"),
    [
        (8, "linux", "32", "expandable_segments:True"),
        (1, "linux", None, "expandable_segments:True"),  # it sends nothing
        (2, "win32", "32", None),  # which has fixed segments
    ],
)
def test_what_is_unset_is_set(
    monkeypatch: pytest.MonkeyPatch, environment: list[str], ranks, system, connections, segments
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert not has_expandable_segments()
    for _ in range(2):
        prepare_cuda(ranks)
        assert settings() == (connections, segments)
    assert has_expandable_segments() == (segments is not None)
    assert environment == []


@pytest.mark.parametrize("name", [ALLOCATOR, BEFORE])
def test_what_the_user_has_set_stays(
    monkeypatch: pytest.MonkeyPatch, environment: list[str], name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    monkeypatch.setenv(CONNECTIONS, "1")
    prepare_cuda(2)
    assert settings() == ("1", "max_split_size_mb:64" if name == ALLOCATOR else None)
    assert not has_expandable_segments()
    (said,) = environment
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1: messages between ranks may wait" in said
    monkeypatch.setenv(name, "expandable_segments:True,max_split_size_mb:64")
    assert has_expandable_segments()


def test_nothing_is_set_too_late(monkeypatch: pytest.MonkeyPatch, environment: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    prepare_cuda(1)
    assert environment == []
    prepare_cuda(2)
    assert settings() == (None, None)
    (said,) = environment
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32 PYTORCH_ALLOC_CONF=expandable_segments:True" in said


@pytest.mark.parametrize(("kind", "connections"), [("cuda", "32"), ("cpu", None)])
def test_a_trainer_sets_it_for_its_ranks(
    monkeypatch: pytest.MonkeyPatch, kind: str, connections: str | None
) -> None:
    strategy = WLBStrategy()
    monkeypatch.setattr(WLBStrategy, "num_processes", 2)
    trainer(strategy, 1)
    assert settings() == (None, None)
    strategy.parallel_devices = [torch.device(kind, 0)] * 2
    strategy._configure_launcher()
    assert settings()[0] == connections
