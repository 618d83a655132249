"""Which long pieces wait: the longest few, by price, with bounds on age and tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.planning.holding import UNIT, Others, Waiting, hold, next_price


def test_hand_worked_choice() -> None:
    # One replica, 4 stages. Work 100 + 60 + 20 + 20 = 200. Stall = max(4·longest - work, 3/2·it):
    # hold 0: max(400 - 200, 150) = 200; hold 1: max(240 - 100, 90) = 140, and 100 wait;
    # hold 2: max(80 - 40, 30) = 40, and 160 wait; hold 3: 0 and 180 wait.
    waiting = Waiting([10, 6, 2], [100, 60, 20], [False] * 3)
    others = Others(20, 20)
    assert hold(waiting, others, 1, 4, UNIT, 0) == 3  # 200, 240, 200, 180
    assert hold(waiting, others, 1, 4, 2 * UNIT, 0) == 0  # 200, 340, 360, 360
    assert hold(waiting, others, 1, 4, UNIT // 2, 0) == 3  # 200, 190, 120, 90
    assert hold(waiting, others, 1, 4, UNIT // 2, 25) == 1  # holding two leaves 22 tokens


def test_a_piece_that_is_due_takes_shorter_ones_with_it() -> None:
    waiting = Waiting([10, 6, 2], [100, 60, 20], [False, True, False])
    assert hold(waiting, Others(20, 20), 1, 4, 1, 0) == 1
    due_first = Waiting([10, 6, 2], [100, 60, 20], [True, False, False])
    assert hold(due_first, Others(20, 20), 1, 4, 1, 0) == 0


def test_replicas_share_the_stall() -> None:
    """With 10 replicas one long piece is a replica's share ten times over: it waits sooner."""
    waiting = Waiting([10], [100], [False])
    assert hold(waiting, Others(900, 900), 1, 4, UNIT * 2, 0) == 0
    assert hold(waiting, Others(900, 900), 10, 4, UNIT * 2, 0) == 1


@given(
    cost=st.lists(st.integers(1, 1000), max_size=20).map(lambda x: sorted(x, reverse=True)),
    others=st.integers(0, 2000),
    replicas=st.integers(1, 5),
    stages=st.integers(1, 5),
    price=st.integers(1, 8 * UNIT),
    least=st.integers(0, 500),
)
def test_is_the_least_of_all_prefixes(cost, others, replicas, stages, price, least) -> None:
    waiting = Waiting(cost, cost, [False] * len(cost))
    chosen = hold(waiting, Others(others, others), replicas, stages, price, least)

    def value(number: int) -> int:
        run = cost[number:]
        longest = max(run, default=0)
        stall = max(
            replicas * stages * longest - others - sum(run),
            (stages - 1) * sum(run[:replicas]) // 2,
        )
        return stall + price * sum(cost[:number]) // UNIT

    legal = [n for n in range(len(cost) + 1) if n == 0 or others + sum(cost[n:]) >= least]
    assert value(chosen) == min(map(value, legal))
    assert chosen in legal


def test_price_moves_towards_the_budget_and_stays_bounded() -> None:
    assert next_price(UNIT, 100, 100, 400) == UNIT
    # A 32nd up or down, and half the square of a 32nd: a factor of exp(±1/32).
    assert next_price(UNIT, 200, 100, 400) == UNIT + UNIT // 32 + UNIT // 2048
    assert next_price(UNIT, 0, 100, 400) == UNIT - UNIT // 32 + UNIT // 2048
    low = high = UNIT
    for _ in range(2000):
        low, high = next_price(low, 0, 100, 400), next_price(high, 400, 100, 400)
    assert 0 < low < UNIT < high < 1000 * UNIT
    # From a bound it comes back.
    assert next_price(low, 200, 100, 400) > low


def test_price_is_where_it_was_after_as_much_above_the_budget_as_below() -> None:
    price = 100 * UNIT
    for _ in range(200):
        price = next_price(price, 300, 200, 400)
        price = next_price(price, 100, 200, 400)
    assert abs(price - 100 * UNIT) < UNIT // 10
