"""The kept figures of messages behind products agree with each other."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from benchmarks import overlap

RESULTS = Path(overlap.__file__).with_name("results")


def test_kept_figures_agree() -> None:
    result = json.loads((RESULTS / "overlap.json").read_text())
    axes = ("tensor", "context", "slices")
    for axis, each in product(axes, ("forward", "backward")):
        figures = result["measured"]["axes"][axis]["slow"][each]
        off, auto, computed = (figures[f"{way}_ms"] for way in overlap.WAYS)
        assert figures["hidden"] == pytest.approx((off - auto) / (off - computed))
    for name, row in result["slimpack"].items():
        assert row["time"] <= 1.0, name
        assert row["communication_auto"] < row["communication_off"], name
        assert row["time"] < row["time_hugging_face"] < 1.0, name
    for name, row in result["keys"].items():
        assert row["no messages"] < row["and own keys"] <= row["everywhere"], name
        assert row["everywhere"] < row["whole pieces"] < 1.0, name
    assert len(result["published"]) == 3
    for row in result["published"]:
        off, auto = row["off_over_published"], row["auto_over_published"]
        assert row["no_messages_over_published"] < auto < off
        assert row["auto_over_off"] == pytest.approx(auto / off)
