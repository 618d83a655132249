"""The figures of the adapters' table and of the two trainers' turns, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.adapters import SHAPE, WORK, figures, of_groups, workloads
from benchmarks.trainer_balance import flops_of, of_way
from lightning_wlb.cost.profile import Profile


def test_figures_of_steps_and_groups() -> None:
    lengths = np.array([100, 100, 300])
    found = figures([[[[2]], [[0], [1]]]], [lengths], Profile.load("h100"))
    even = (WORK(300) + 2 * WORK(100)) / 2
    assert found["imbalance"] == pytest.approx(WORK(300) / even)
    assert found["lockstep"] == pytest.approx((WORK(300) + WORK(100)) / even)
    assert found["most_tokens"] == 300
    groups = of_groups([[[2, 0], [2]], [[1], []]], lengths)
    assert groups["imbalance"] == pytest.approx((WORK(300) / 2 + 2 * WORK(100)) / even)
    assert groups["ranks_by_length"] == {"65 to 128": [1, 1], "257 to 512": [2, 2]}
    assert {name: each.max() <= 32_768 for name, each in workloads().items()}


def test_figures_of_turns() -> None:
    import torch

    turns = [{"steps": [[2.0, 1.0, 10, 100, 7]]}, {"steps": [[3.0, 0.5, 30, 300, 9]]}]
    found = of_way(turns)
    assert found["wall_ns_per_token"] == pytest.approx(3e9 / 40)
    assert found["processor_ns_per_token"] == pytest.approx(1e9 / 40)
    assert found["imbalance_of_work"] == pytest.approx(1.5)
    assert found["longest_row"] == 9
    rows = {"position_ids": torch.tensor([[0, 1, 2, 0, 1]]), "input_ids": torch.zeros(1, 5)}
    assert flops_of(rows, SHAPE) == (5, WORK(3) + WORK(2))
    masked = {"attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    assert flops_of(masked, SHAPE) == (5, WORK(3) + WORK(2))
