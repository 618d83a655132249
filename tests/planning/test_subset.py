"""Which subset of long pieces waits, against every subset."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.planning.holding import UNIT, Others, Waiting
from lightning_wlb.planning.subset import Batch, Bins, _level, _Long, _Step, _value, hold_subset

NO_DUE = [False] * 9


def bins(count=4, cap=300, price=UNIT // 8, least=0) -> Bins:
    return Bins(count, cap, 500, least, 800, price, 200)


def test_a_lone_giant_waits_and_four_of_them_go() -> None:
    others = Others(800, 2000)
    lone = Waiting([200], [1500], NO_DUE[:1])
    assert hold_subset(lone, others, [], bins()) == [True]
    four = Waiting([200] * 4, [1500] * 4, NO_DUE[:4])
    assert hold_subset(four, others, [], bins(cap=500)) == [False] * 4
    assert hold_subset(lone, others, [], bins(price=100 * UNIT)) == [False]
    assert hold_subset(Waiting([200], [1500], [True]), others, [], bins()) == [False]


def test_a_piece_and_its_match_go_and_the_odd_one_waits() -> None:
    # 1000 and 2·500 balance two bins; 700 has no match.
    waiting = Waiting([100, 80, 60, 60], [1000, 700, 500, 500], NO_DUE[:4])
    chosen = hold_subset(waiting, Others(0, 0), [], bins(count=2, price=UNIT // 8))
    assert chosen == [False, True, False, False]


def test_looks_ahead() -> None:
    """At 1500 a step it does not pay to wait, unless its match is in the next global batch."""
    waiting = Waiting([100], [1000], NO_DUE[:1])
    others = Others(200, 400)
    costly = bins(count=2, price=12 * UNIT, cap=900)
    match, dull = Batch([100], [1000], others), Batch([], [], others)
    assert hold_subset(waiting, others, [], costly) == [False]
    assert hold_subset(waiting, others, [match], costly) == [True]
    assert hold_subset(waiting, others, [dull, match], costly) == [False]


@given(
    pieces=st.lists(st.integers(20, 200), min_size=1, max_size=6),
    others=st.integers(0, 1200),
    price=st.integers(0, UNIT),
    count=st.integers(1, 4),
)
def test_is_no_worse_than_any_single_change(pieces, others, price, count) -> None:
    """A local optimum over additions, removals and exchanges; nearly always the optimum."""
    tokens = sorted(pieces, reverse=True)
    waiting = Waiting(tokens, [x * x // 20 + x for x in tokens], [False] * len(tokens))
    settings_ = bins(count=count, price=price)
    rest = Others(others, 2 * others)
    chosen = hold_subset(waiting, rest, [], settings_)
    step = _Step(count, 300, 0, 800, price, 200, others, 2 * others * UNIT * 16 // 500)
    long = _Long(tokens, [cost * UNIT * 16 // 500 for cost in waiting.cost], [0] * len(tokens))

    def value(held: Sequence[bool]) -> int:
        return _value(long, sum(1 << piece for piece, waits in enumerate(held) if waits), step)

    reached = value(chosen)
    for held in product([False, True], repeat=len(tokens)):
        differing = sum(a != b for a, b in zip(held, chosen, strict=True))
        exchange = differing == 2 and sum(held) == sum(chosen)
        if differing <= 1 or exchange:
            assert reached <= value(held)


@given(
    loads=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 300)), min_size=1, max_size=6),
    tokens=st.integers(1, 900),
    rate=st.integers(1, 4),
)
def test_level_is_that_of_pouring_unit_by_unit(loads, tokens, rate) -> None:
    level, overflow = _level(
        [load for load, _ in loads], [room for _, room in loads], tokens, tokens * rate
    )
    poured = [load for load, _ in loads]
    left = [space * rate for _, space in loads]
    rest = tokens * rate
    while rest and any(left):
        index = min((i for i in range(len(loads)) if left[i]), key=lambda i: poured[i])
        poured[index] += 1
        left[index] -= 1
        rest -= 1
    assert overflow == rest
    assert level == max(poured)
