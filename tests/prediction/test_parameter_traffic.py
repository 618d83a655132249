"""The closed form of traffic, against units that travel one by one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.mesh import Mesh
from lightning_wlb.prediction.parameter_traffic import ParameterTraffic
from tests.prediction.test_predictor import FREE_MEMORY, SHAPE, predictor

stages = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 60), st.integers(0, 60), st.integers(0, 60)),
    min_size=1,
    max_size=6,
)


def traffic_of(stages: list[tuple[int, ...]], ranks: int) -> ParameterTraffic:
    """Whose units take whole numbers of ns."""
    units, gather, reduce, _ = zip(*stages, strict=True)
    return ParameterTraffic(
        ranks,
        units,
        tuple(a * b for a, b in zip(units, gather, strict=True)),
        tuple(a * b for a, b in zip(units, reduce, strict=True)),
        0,
    )


@given(stages, st.integers(1, 3))
def test_a_first_forward_begins_where_no_unit_holds_it_up(stages, ranks):
    traffic = traffic_of(stages, ranks)
    for rank in range(ranks):
        there = 0
        for stage in range(rank, len(stages), ranks):
            units, gather, _, forward = stages[stage]
            # A unit must be there when those before it have run.
            earliest = 0
            for number in range(units):
                there += gather
                earliest = max(earliest, there - number * forward)
            assert traffic.begins(stage, units * forward) == earliest


@given(stages, st.integers(1, 3), st.lists(st.integers(0, 500), min_size=12, max_size=12))
def test_gradients_travel_from_the_last_unit_to_the_first(stages, ranks, ends):
    traffic = traffic_of(stages, ranks)
    last = {
        stage: [(units * took + end, units * took), (units * took + ends[stage + 6], units * took)]
        for stage, ((units, _, _, took), end) in enumerate(zip(stages, ends, strict=False))
    }
    expected = []
    for rank in range(ranks):
        now = 0
        for stage in reversed(range(rank, len(stages), ranks)):
            units, _, reduce, took = stages[stage]
            begin = max(end - took * units for end, _ in last[stage])
            for number in range(units):
                now = max(now, begin + (number + 1) * took) + reduce
        expected.append(now)
    assert traffic.ends(last) == max(expected)


def test_of_a_mesh_and_of_a_single_rank() -> None:
    shape = replace(SHAPE, vocab_size=0)
    alone = predictor(Mesh(), shape=shape, profile=FREE_MEMORY).traffic
    assert (alone.gather, alone.reduce, alone.begins(0, 100)) == ((0,), (0,), 0)
    assert alone.ends({0: [(90, 50), (70, 10)]}) == 90
    assert alone.ends({}) == 0
    model = predictor(Mesh(data=2, pipeline=2), shape=shape)
    parameters = model.memory.model.parameters(model.memory.parts[0])
    traffic = model.traffic
    assert traffic.buckets == (5, 5)  # four layers and an end
    assert traffic.gather[0] == model.latency.gather_ns(parameters) > 0
    assert traffic.reduce[0] == model.latency.reduce_ns(parameters) > traffic.gather[0]
