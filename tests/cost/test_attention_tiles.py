"""The reference kernel cost against a loop over tiles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.cost.attention_tiles import (
    TILE,
    UNITS,
    layers_kernel_cost,
    reference_kernel_cost,
)


def by_tiles(queries: int, keys: int, overhead: int, sliding_window: int | None) -> float:
    """The formula of the module's docstring, word by word; in key/value tiles."""
    total = 0.0
    for first in range(0, queries, TILE):
        last_query = min(first + TILE, queries)
        seen = keys - queries + last_query
        read = -(-seen // TILE)
        if sliding_window is not None:
            read -= max(keys - queries + first - sliding_window + 1, 0) // TILE
        total += overhead + read * (1.25 if queries <= TILE else 1.0)
    return total


@given(
    segments=st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 5000)), max_size=8),
    overhead=st.integers(0, 3),
    sliding_window=st.none() | st.integers(1, 6000),
)
def test_equals_a_loop_over_tiles(
    segments: list[tuple[int, int]], overhead: int, sliding_window: int | None
) -> None:
    queries = np.array([each[0] for each in segments], dtype=np.int64)
    keys = queries + np.array([each[1] for each in segments], dtype=np.int64)
    expected = [
        UNITS * by_tiles(q, k, overhead, sliding_window)
        for q, k in zip(queries.tolist(), keys.tolist(), strict=True)
    ]
    got = reference_kernel_cost(queries, keys, overhead, sliding_window)
    assert got.dtype == np.int64
    assert got.tolist() == expected


@given(length=st.integers(1, 4000), data=st.data())
def test_a_cut_is_free_between_tiles_and_never_a_gain(length: int, data: st.DataObject) -> None:
    """What `hybrid` builds on: cuts at whole tiles from the end cost nothing, two tiles a side."""

    def cost(start: int, stop: int) -> int:
        return int(reference_kernel_cost(np.array([stop - start]), np.array([stop]))[0])

    cut = data.draw(st.integers(0, length))
    parts = sum(cost(*each) for each in ((0, cut), (cut, length)) if each[0] < each[1])
    assert parts >= cost(0, length)
    if cut > TILE and length - cut > TILE and (length - cut) % TILE == 0:
        assert parts == cost(0, length)


def test_layers_whose_windows_differ_cost_their_sum() -> None:
    queries, keys = np.array([300, 128, 1]), np.array([4000, 128, 900])
    near = reference_kernel_cost(queries, keys, sliding_window=200)
    full = reference_kernel_cost(queries, keys)
    assert (layers_kernel_cost(queries, keys, {200: 30, None: 6}) == 5 * near + full).all()
    assert (layers_kernel_cost(queries, keys, {200: 77}) == near).all()
    assert (layers_kernel_cost(queries, keys, {None: 0}) == 0).all()
