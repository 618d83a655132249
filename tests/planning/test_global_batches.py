"""Global batches: each draw continues where a saved state stands, until the epoch is exhausted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.planning.global_batches import GlobalBatches, document_numbers


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


@pytest.mark.parametrize("documents", [1, 2, 300, 70_000])
def test_the_order_is_numpys_whatever_the_size_of_a_number(documents) -> None:
    order = np.arange(documents)
    np.random.default_rng((7, 0)).shuffle(order)
    drawn = GlobalBatches(np.ones(documents, np.int64), documents, 1, False, 7, True).draw(0)
    assert [piece.document for piece in drawn] == order.tolist()
    assert document_numbers(documents).dtype == np.int32
