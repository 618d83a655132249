"""The factors of Hydraulis' figures multiply."""

from __future__ import annotations

from math import prod

import pytest

from benchmarks.hydraulis_paper import (
    ablation,
    best_baseline,
    best_of,
    chosen,
    our_factors,
    papers_factors,
    tables,
)

STATIC = {
    "megatron": {"step_ms": 300.0, "flops": 100, "mesh": "1,1,1,4", "uneven": [0.5, 0.3]},
    "deepspeed": {"step_ms": 280.0, "flops": 70, "mesh": "1,1,4,1"},
    "two_stage": {"step_ms": 240.0, "flops": 100, "mesh": "2,1,1,2", "uneven": [0.1, 0.2]},
    "best_fit, no context": {"step_ms": 250.0, "flops": 100, "mesh": "1,2,1,2"},
    "best_fit": {"step_ms": 200.0, "flops": 100, "mesh": "1,1,2,2"},
    "hydraulis, no context": {"step_ms": 200.0, "flops": 100, "mesh": "2,1,1,2"},
    "hydraulis": {"step_ms": 160.0, "flops": 100, "mesh": "2,1,2,1"},
    "auto, no context": {"step_ms": 150.0, "flops": 100, "mesh": "2,1,1,2"},
    "auto": {"step_ms": 128.0, "flops": 100, "mesh": "2,2,1,1"},
}
MADE = {
    "auto": {},
    "static": STATIC,
    "paper": {
        "mesh": "2,1,1,2",
        "window": 100,
        "packed_full_ms": [300.0, 300.0],
        "on_mesh_ms": [200.0, 280.0],
        "strategies": [
            {"strategy": "alike", "alike": True, "longest": 10, "ms": [150.0, None]},
            {"strategy": "mixed", "alike": False, "longest": 100, "ms": [160.0, 240.0]},
            {"strategy": "short", "alike": False, "longest": 99, "ms": [150.0, 100.0]},
        ],
    },
    "dynamic": {
        "mesh": "2,1,2,1",
        "on_mesh_ms": [130.0, 130.0],
        "strategies": [
            {"strategy": "alike", "alike": True, "longest": 100, "ms": [120.0, 140.0]},
            {"strategy": "mixed", "alike": False, "longest": 100, "ms": [125.0, 72.0]},
        ],
    },
}  # fmt: skip


def test_factors_multiply_to_the_whole_speed_up() -> None:
    assert best_baseline(STATIC) == ("megatron", 1)  # For as much work DeepSpeed takes 400.
    faster = {**STATIC, "deepspeed": {"step_ms": 140.0, "flops": 70}}
    assert best_baseline(faster) == ("deepspeed", 300 / 200)
    assert best_baseline({**STATIC, "deepspeed": None}) == ("megatron", 1)
    paper = papers_factors(MADE)
    assert paper == {"packing": 300 / 240, "strategies": 240 / 125}
    ours = our_factors(MADE)
    expected = [300 / 250, 250 / 200, 200 / 160, 160 / 128, 128 / 96]
    assert list(ours.values()) == pytest.approx(expected, rel=1e-12)
    assert prod(ours.values()) == pytest.approx(300 / 96)
    # Equal pipelines alone: 125 on the best of theirs and the mesh.
    assert best_of(MADE["dynamic"], alike_only=True) == [120.0, 130.0]
    # A run that would be slower elsewhere stays on its mesh.
    slow = {**MADE, "dynamic": {**MADE["dynamic"], "strategies": []}}
    assert our_factors(slow)["strategies"] == 1


def test_ablation_and_choice_by_step() -> None:
    # (c) is the one mixture that holds a whole window.
    assert ablation(MADE["paper"]) == {"a": 1, "b": 300 / 240, "c": 300 / 200, "d": 300 / 125}
    assert chosen(MADE["paper"]) == {"alike": 1, "short": 1}
    assert chosen({**MADE["paper"], "strategies": []}) == {"the mesh 2,1,1,2": 2}
    found = {title.partition(":")[0]: rows for title, _, rows in tables(
        {"settings": {"7B": MADE, "part": {"static": STATIC}}}
    )}  # fmt: skip
    assert found["Where the speed-up over Megatron comes from, simulated"] == [
        ["7B", "Megatron 1.00", "1.25", "1.92", "2.40", "1.20", "1.25", "1.25", "1.25", "1.33",
         "1.02", "3.13", "2.40", "3.13"]
    ]  # fmt: skip
    assert found["Figure 11"] == [["7B", "not given in text", "300", "280", "125", "128"]]
