"""What the tests of the CUDA kernels need on a machine that has none."""

from __future__ import annotations

import pytest
import torch

from lightning_wlb.attention import backends as varlen
from tests.attention.flash import on_device_of
from tests.device import BACKENDS


@pytest.fixture
def every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own name, also where another one stands in for all."""
    for name, loader in BACKENDS.items():
        monkeypatch.setitem(varlen.BACKENDS, name, loader)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a CUDA device, of Hopper."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_device_of(monkeypatch, 9)
