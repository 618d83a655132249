"""The link between two processes, and none where there are no two devices."""

from __future__ import annotations

import pytest
import torch

from lightning_wlb.profiling.link_speed import measure_link


def test_one_gpu_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert measure_link(torch.device("cuda", 0)) is None
