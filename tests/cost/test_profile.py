"""Profiles: round trip, the shipped ones, and answers to bad files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile, shipped_profiles
from lightning_wlb.cost.rates import AttentionTable
from lightning_wlb.cost.shape import ModelShape


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_survives_the_round_trip_and_names_its_sources(name: str) -> None:
    profile = Profile.load(name)
    assert profile.name == name
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.sources
    assert profile.date
    assert ("measured" if profile.measured else "analytic") in profile.provenance


@pytest.mark.parametrize(
    ("name", "head_dim", "published", "within"),
    [
        # FlashAttention-3, Figure 5: causal, 16,384 tokens in sequences of 512 to all of them, its
        # own bars (a newer kernel was fitted along with them) and those of FlashAttention-2.
        ("h100", 128, (292, 423, 521, 579, 602, 616), 0.07),
        ("h100-fa2", 128, (191, 260, 298, 319, 333, 335), 0.04),
        ("h100-fa2", 64, (180, 229, 262, 284, 295, 299), 0.01),
    ],
)
def test_calls_take_nearly_as_long_as_published(
    name: str, head_dim: int, published: tuple[int, ...], within: float
) -> None:
    heads = 2048 // head_dim
    alone = replace(Profile.load(name), sustained=1.0)
    model = LatencyModel(alone, ModelShape(2048, 1, heads, heads, head_dim, 1, 0))
    for length, bar in zip((512, 1024, 2048, 4096, 8192, 16384), published, strict=True):
        lengths = np.full(16384 // length, length)
        forward, _ = model.attention_ns(lengths, lengths)
        rate = 2 * 16384 * length * 2048 / forward / 1000
        assert rate == pytest.approx(bar, rel=within)


def test_a_profile_of_another_kernel_of_the_device_differs_in_attention() -> None:
    for name in ("h100", "h200"):
        fast, slow = Profile.load(name), Profile.load(f"{name}-fa2")
        told = {"name", "sources", "kernel", "attention"}
        changed = {each for each in vars(fast) if getattr(fast, each) != getattr(slow, each)}
        assert changed == told
        # 12 bytes of memory traffic for each parameter and backward.
        each = round(12e9 / slow.element_bytes_per_second, 6)
        assert slow.action.parameter_ns == each


def test_the_nearest_head_size_is_taken() -> None:
    profile = Profile.load("h100")
    assert profile.attention_table(128).head_dim == 128
    assert profile.attention_table(80).head_dim == 64
    assert profile.attention_table(256).head_dim == 128


def test_another_device_or_dtype_is_refused_with_the_remedy() -> None:
    profile = Profile.load("h100")
    profile.check(device_type="cuda", dtype="bfloat16")
    with pytest.raises(ValueError, match=r"'h100' was made for dtype 'bfloat16', not for 'float3"):
        profile.check(dtype="float32")
    with pytest.raises(ValueError, match=r"device 'cuda', not for 'cpu'.*lightning-wlb profile"):
        profile.check(device_type="cpu")


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    profile = replace(Profile.load("h100"), name="mine", measured=True)
    path = tmp_path / "mine.json"
    path.write_text(profile.to_json())
    assert Profile.load(path) == profile
    assert ", measured, " in profile.provenance


def test_a_name_that_is_nothing_lists_the_shipped() -> None:
    with pytest.raises(
        ValueError, match=r"'v100' is neither shipped \(.*h100-fa2, h200, h200-fa2\) nor"
    ):
        Profile.load("v100")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "format 2"),
        ({"attention": []}, "no table"),
        ({"links": {}}, "no entry 'node'"),
        ({"peak_flops": 0}, "peak_flops"),
        ({"surprise": 1}, "surprise"),
        ({"links": {"node": {"latency_ns": 1, "bytes_per_second": 0}}}, r"bytes_per_second=0"),
        (
            {"layer": {"rows": [1, 1], "forward": [1e9, 1e9], "backward": [1e9, 1e9]}},
            "rise strictly",
        ),
        (
            {"layer": {"rows": [1, 2], "forward": [1e9], "backward": [1e9, 1e9]}},
            "1 rates, rows has 2",
        ),
        ({"name": ["h100"]}, "name=.*another type"),
        ({"kernel": 3}, "kernel=3.*another type"),
        ({"memory_bytes": "80"}, "memory_bytes='80'.*another type"),
        ({"peak_flops": float("nan")}, "peak_flops=nan"),
        ({"action": {"ns": [-1.0, 0.0]}}, r"ns=-1\.0 must be at least 0"),
        ({"errors": {"layers": float("inf")}}, "layers=inf must be at least 0, and finite"),
        # A unit that was mistaken: GB, TFLOP/s, seconds in place of nanoseconds.
        ({"memory_bytes": 80}, r"memory_bytes=80 is not from 10000 .* memory in bytes"),
        ({"peak_flops": 989.4}, r"peak_flops=989\.4 is not from .* FLOP/s"),
        ({"action": {"ns": [1e29, 0.0]}}, r"ns=1e\+29 is not from 0 to 1e\+12"),
        # What would leave 64 bits when it is planned with.
        ({"memory_bytes": 10**18}, r"memory_bytes=1\d+ is not from 10000 to 1e\+13"),
        ({"eager_factor": 1e18}, r"eager_factor=1e\+18 is not from 0\.0001 to 10000"),
        ({"sustained": 1e-300}, r"sustained=1e-300 is not from 0\.0001"),
        ({"action": {"parameter_ns": 1e12}}, r"parameter_ns=1\S+ is not from 0 to 1e\+06"),
        ({"action": {"row_ns": [0, 1e12]}}, r"row_ns=1\S+ is not from 0 to 1e\+06"),
        ({"devices_per_node": 1.5}, r"devices_per_node=1\.5 is of type float"),
        ({"sustained": 50}, "sustained=50 is out of range"),
        ({"device_type": "tpu"}, "device_type='tpu' is not one of cpu, cuda"),
        ({"measured": 3}, "measured=3 is of another type"),
        ({"shape": {"width": 64}}, r"shape=.* to be empty, or to have dim"),
        ({"errors": [0.1]}, "wrong.json: "),
        ({"device": "H100\x1b[2J"}, r"'H100\\x1b\[2J' has characters that cannot be printed"),
        ({"errors": {"\x1b[2J": 0.1}}, r"'\\x1b\[2J': 0\.1 has characters"),
    ],
)
def test_a_wrong_entry_is_named(change: dict, message: str, tmp_path: Path) -> None:
    values = json.loads(Profile.load("h100").to_json()) | change
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message) as error:
        Profile.load(path)
    assert "wrong.json" in str(error.value)


def test_a_missing_entry_and_no_json_are_named(tmp_path: Path) -> None:
    values = json.loads(Profile.load("h100").to_json())
    del values["head"]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="'head' is missing"):
        Profile.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        Profile.load(path)


def test_a_table_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="ask for 2 rows of 1"):
        AttentionTable(64, 128, (128, 256), (1.0,), ((1.0,),), ((1.0,), (1.0,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": 1e20}, "tile=1e.20 is not from"),
        ({"tile": 0.5}, "tile=0.5 is of type float"),
        ({"tile": 1 << 40}, "tile is above 1048576"),
        ({"at_once": [1.5, 1]}, "at_once=1.5 is of type float"),
    ],
)
def test_sizes_of_tiles_are_whole_and_can_be_multiplied(change: dict, message: str) -> None:
    values = json.loads(Profile.load("h100").to_json())
    values["attention"][0] |= change
    with pytest.raises(ValueError, match=message):
        Profile.from_json(json.dumps(values))
