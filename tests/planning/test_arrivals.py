"""Global batches: each draw continues where a saved state stands, until the epoch is exhausted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.planning.arrivals import GlobalBatches


def batches(lengths, cuts=False) -> GlobalBatches:
    return GlobalBatches(np.array(lengths), 20, 10, cuts, 0, False)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20), cuts=st.booleans())
def test_a_state_is_a_place_in_the_epoch(lengths, cuts) -> None:
    whole = batches(lengths, cuts)
    tokens = 0
    while not whole.exhausted:
        resumed = batches(lengths, cuts)
        resumed.load_state_dict(whole.state_dict())
        drawn = whole.draw(0)
        assert resumed.draw(0) == drawn
        assert resumed.state_dict() == whole.state_dict()
        assert all(piece.tokens <= 10 for piece in drawn)
        tokens += sum(piece.tokens for piece in drawn)
    assert whole.draw(0) is None
    assert tokens == sum(lengths)
