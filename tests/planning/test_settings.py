"""Settings out of range are answered with the value and the remedy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_wlb.planning.packing import PACKINGS, PackingChoice
from lightning_wlb.planning.packing.slim import SlimOptions, SlimPacker
from lightning_wlb.planning.packing.wlb import WlbOptions
from lightning_wlb.planning.settings import DataSettings


def test_cap_follows_the_packing() -> None:
    assert DataSettings(8192, 4, packing="original").token_cap == 8192
    assert DataSettings(8192, 4, packing="wlb").token_cap == 12288
    assert DataSettings(8192, 4, cap=9000).token_cap == 9000
    assert DataSettings(1, 1, packing="wlb").token_cap == 1
    assert DataSettings(8192, 4).nominal_tokens == 32768


def test_the_default_packing_needs_no_more_memory_than_a_window() -> None:
    settings = DataSettings(8192, 4)
    assert settings.packing_choice.method == "auto"
    assert settings.token_cap == 8192


def test_a_packing_by_name_is_its_defaults() -> None:
    for method, packer in PACKINGS.items():
        choice = DataSettings(8, 1, packing=method).packing_choice
        assert choice == PackingChoice(packer, packer.Options())
        assert choice.method == method
        assert DataSettings(8, 1, packing={"method": method}) == DataSettings(8, 1, packing=method)


def test_options_belong_to_their_method() -> None:
    asked = {"method": "wlb", "queues": np.int64(3), "max_age": 5}
    settings = DataSettings(8192, 4, packing=asked)
    assert settings.packing_choice.options == WlbOptions(queues=3, max_age=5)
    assert settings.packing_choice.options.fingerprint == {"max_age": 5}
    assert type(settings.packing_choice.options.queues) is int
    # Settings that are changed keep the options.
    assert replace(settings, shuffle=False).packing_choice == settings.packing_choice
    slim = DataSettings(8192, 4, packing={"method": "slim", "micro_packs": 2})
    assert slim.packing_choice.options == SlimOptions(micro_packs=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_window": 0}, "context_window=0, but it must be at least 1"),
        ({"micro_batches": 0}, "micro_batches=0, but it must be at least 1"),
        ({"seed": -1}, "seed=-1, but it must be at least 0"),
        ({"max_tokens": 0}, "max_tokens=0, but it must be at least 1"),
        ({"cap": 99}, r"cap=99 is below context_window=100.* Raise the cap"),
        ({"packing": "tetris"}, r"packing='tetris' is not one of .*original, .*wlb"),
        ({"packing": 7}, r"packing=7 is not one of .*original"),
        ({"packing": {"queues": 3}}, r"names no method.* {'method': 'wlb', 'queues': 3}"),
        ({"packing": {"method": "tetris"}}, r"packing='tetris' is not one of"),
        (
            {"packing": {"method": "wlb", "queue": 3}},
            "packing 'wlb' has no option 'queue'. It takes queues, max_age",
        ),
        (
            {"packing": {"method": "original", "queues": 3}},
            "packing 'original' has no option 'queues'. It takes none",
        ),
        ({"packing": {"method": "wlb", "queues": -1}}, "queues=-1, but it must be at least 0"),
        ({"packing": {"method": "wlb", "max_age": 0}}, "max_age=0, but it must be at least 1"),
        ({"packing": {"method": "slim", "micro_packs": 0}}, "micro_packs=0"),
        ({"long_documents": "drop"}, r"long_documents='drop'.* split, truncate, error"),
    ],
)
def test_bad_data_settings(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        DataSettings(**{"context_window": 100, "micro_batches": 2, **changes})


def test_a_packing_of_ones_own_is_a_class() -> None:
    class OwnPacker(SlimPacker):
        pass

    settings = DataSettings(8, 1, packing={"method": OwnPacker, "micro_packs": 2})
    assert settings.packer is OwnPacker
    assert settings.packing_choice.options == SlimOptions(micro_packs=2)
    assert settings.packing_choice.method == "OwnPacker"
    with pytest.raises(ValueError, match="has no option 'queues'"):
        DataSettings(8, 1, packing={"method": OwnPacker, "queues": 2})
