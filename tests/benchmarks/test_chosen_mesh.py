"""The chosen mesh against the others: its place and the ratios, by hand."""

from __future__ import annotations

import pytest

from benchmarks.chosen_mesh import compared, us_per_token
from benchmarks.measured import RankStep
from lightning_wlb.mesh import Mesh
from tests.prediction.test_predictor import plan_of

DATA, PIPELINE, TENSOR = Mesh(data=2), Mesh(pipeline=2, virtual_stages=2), Mesh(tensor=2)


def test_a_turn_takes_as_long_as_the_slowest_rank_of_each_step() -> None:
    def step(wall: float) -> RankStep:
        return RankStep(plan_of([[[10], [10]]]).to_json(), 5.0, wall, [], [], [(0, 1)])

    assert us_per_token([[step(1.0), step(4.0)], [step(3.0), step(2.0)]]) == pytest.approx(7e6 / 40)


def test_meshes_are_ordered_by_the_median_of_what_they_are_to_the_chosen_one() -> None:
    rounds = [
        {DATA: 1.0, PIPELINE: 0.5, TENSOR: 3.0},
        {DATA: 10.0, PIPELINE: 8.0, TENSOR: 20.0},  # a slow machine weighs no more
        {DATA: 1.0, PIPELINE: 0.9, TENSOR: 4.0},
    ]
    found = compared(rounds, DATA, {DATA: 7.0, PIPELINE: 8.0, TENSOR: 9.0})
    assert (found["chosen"], found["place"], found["of"]) == ("2,1,1,1", 2, 3)
    first, second, third = found["rows"]
    assert first == {
        "mesh": "1,2,1,1 with 2 virtual stages",
        "predicted_us_per_token": 8.0,
        "us_per_token": 0.9,
        "over_chosen": 0.8,
        "over_chosen_least": 0.5,
        "over_chosen_most": 0.9,
    }
    assert (second["over_chosen"], third["over_chosen"]) == (1.0, 3.0)
