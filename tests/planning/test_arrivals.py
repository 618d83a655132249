"""Global batches: looking ahead changes nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.planning.arrivals import GlobalBatches


def batches(lengths, cuts=False) -> GlobalBatches:
    return GlobalBatches(np.array(lengths), 20, 10, cuts, 0, False)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    looks=st.lists(st.integers(0, 4), max_size=40),
    cuts=st.booleans(),
)
def test_peeking_foretells_and_does_not_disturb(lengths, looks, cuts) -> None:
    plain, peeked = batches(lengths, cuts), batches(lengths, cuts)
    drawn = []
    while (batch := plain.draw()) is not None:
        drawn.append(batch)
    for number, batch in enumerate(drawn):
        if number < len(looks):
            seen = peeked.peek(looks[number])
            assert seen == [
                [piece.tokens for piece in each] for each in drawn[number : number + looks[number]]
            ]
        state = peeked.state_dict()
        assert peeked.draw() == batch
        resumed = batches(lengths, cuts)
        resumed.load_state_dict(state)
        assert resumed.draw() == batch
    assert peeked.draw() is None
    assert peeked.peek(3) == []
