from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.schedule.layer_split import split_stages


def test_fewer_layers_than_stages():
    with pytest.raises(ValueError, match="2 layers cannot be split into 3 pipeline stages"):
        split_stages([1, 1], 3)


@given(st.lists(st.integers(1, 110), min_size=1, max_size=8), st.integers(1, 8))
def test_no_split_is_better(layers, stages):
    stages = min(stages, len(layers))

    def dearest(cuts):
        edges = [0, *cuts, len(layers)]
        return max(sum(layers[a:b]) for a, b in pairwise(edges))

    found = split_stages(layers, stages)
    assert [layer for part in found for layer in part] == list(range(len(layers)))
    assert all(found)
    best = min(dearest(cuts) for cuts in combinations(range(1, len(layers)), stages - 1))
    assert dearest([part.stop for part in found[:-1]]) == best
