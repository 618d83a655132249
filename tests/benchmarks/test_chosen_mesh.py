"""The chosen mesh against the others: its place and the ratios, by hand."""

from __future__ import annotations

import pytest

from benchmarks.chosen_mesh import Times, compared, times_of
from benchmarks.measured import RankStep
from lightning_wlb.mesh import Mesh
from tests.prediction.test_predictor import plan_of

DATA, PIPELINE, TENSOR = Mesh(data=2), Mesh(pipeline=2, virtual_stages=2), Mesh(tensor=2)


def test_a_turn_is_its_schedule_and_what_the_busiest_rank_needs_besides() -> None:
    def step(rank: int, wall: float, cpu: float) -> RankStep:
        order = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")[rank].split()
        compute = [(text, 1.0 if text[1] == "F" else 2.0) for text in order]
        return RankStep(plan_of([[[10], [10]]]).to_json(), 5.0, wall, compute, [], [], cpu)

    # 1F0 1-2, 1B0 2-4, 1F1 4-5, 1B1 5-7, 0B1 7-9; of 6 s each; 2 s and 3 s besides, then 5 s.
    steps = [[step(0, 10.0, 8.0), step(0, 20.0, 6.0)], [step(1, 11.0, 9.0), step(1, 12.0, 11.0)]]
    found = times_of(Mesh(pipeline=2), "1f1b", steps)
    assert found.processor == pytest.approx(1e6 * (9 + 3 + 9 + 5) / 40)
    assert found.wall == pytest.approx(1e6 * (11 + 20) / 40)


def times(processor: float, wall: float = 1.0) -> Times:
    return Times(processor, wall)


def test_meshes_are_ordered_by_the_median_of_what_they_are_to_the_chosen_one() -> None:
    rounds = [
        {DATA: times(1.0), PIPELINE: times(0.5, 3.0), TENSOR: times(3.0)},
        {DATA: times(10.0), PIPELINE: times(8.0, 4.0), TENSOR: times(20.0)},  # a slow machine
        {DATA: times(1.0), PIPELINE: times(0.9, 2.0), TENSOR: times(4.0)},
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
        "wall_us_per_token": 3.0,
        "wall_over_chosen": 3.0,
    }
    assert (second["over_chosen"], third["over_chosen"]) == (1.0, 3.0)
