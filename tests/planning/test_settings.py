"""Settings out of range are answered with the value and the remedy."""

from __future__ import annotations

import pytest

from lightning_wlb.planning.settings import DataSettings, MeshSettings


def test_cap_follows_the_packing() -> None:
    assert DataSettings(8192, 4, packing="original").token_cap == 8192
    assert DataSettings(8192, 4, packing="wlb").token_cap == 12288
    assert DataSettings(8192, 4, cap=9000).token_cap == 9000
    assert DataSettings(1, 1, packing="wlb").token_cap == 1
    assert DataSettings(8192, 4).nominal_tokens == 32768


def test_the_default_packing_needs_no_more_memory_than_a_window_and_no_delay() -> None:
    settings = DataSettings(8192, 4)
    assert settings.packing == "auto"
    assert settings.token_cap == 8192
    assert settings.nominal_replicas == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_window": 0}, "context_window=0, but it must be at least 1"),
        ({"micro_batches": 0}, "micro_batches=0, but it must be at least 1"),
        ({"queues": -1}, "queues=-1, but it must be at least 0"),
        ({"seed": -1}, "seed=-1, but it must be at least 0"),
        ({"max_tokens": 0}, "max_tokens=0, but it must be at least 1"),
        ({"cap": 99}, r"cap=99 is below context_window=100.* Raise the cap"),
        ({"packing": "tetris"}, r"packing='tetris' is not one of .*original, .*wlb"),
        ({"long_documents": "drop"}, r"long_documents='drop'.* split, truncate, error"),
        ({"thresholds": (50, 20)}, r"thresholds=\(50, 20\).* increase strictly"),
        ({"thresholds": (50, 101)}, r"thresholds=\(50, 101\).* window of 100 tokens"),
    ],
)
def test_bad_data_settings(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        DataSettings(**{"context_window": 100, "micro_batches": 2, **changes})


@pytest.mark.parametrize("name", ["replicas", "context_parallel_size", "tensor_parallel_size"])
def test_bad_mesh_settings(name) -> None:
    with pytest.raises(ValueError, match=f"{name}=0, but it must be at least 1"):
        MeshSettings(**{name: 0})


def test_a_flag_is_a_flag() -> None:
    with pytest.raises(ValueError, match="slices='no'"):
        MeshSettings(slices="no")  # type: ignore[arg-type]
