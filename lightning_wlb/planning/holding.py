"""Balanced release: which long pieces wait, chosen each step under a budget of delay.

A step takes as long as its costliest piece dictates, so costly pieces should run in the same
step. Of the pieces longer than an eighth of the context window, the k longest wait, and k is
chosen anew each step to minimise

    stall(longest released) + price · work of the pieces that wait.

The stall is what the released pieces cost beyond their own work in a pipeline of P stages and R
replicas: P passes of the longest piece less the replica's work, or half of (P - 1) times the
longest piece of each replica, whichever is more. If some long piece runs, every shorter one may
as well, so nothing is lost by holding only the longest.

The price steers delay to a budget. By Little's law the mean delay of tokens is the tokens that
wait divided by the tokens of a step; where more wait than the budget says, the price rises. There
are no thresholds to choose. A piece that has waited ``max_age`` steps goes, and with it every
shorter one; and a step never falls below 45 % of its nominal tokens if what waits can prevent it.

Cost: 0.1 ms for 30 waiting pieces, linear in them after a sort. Not for a pipeline of one stage
and one replica, where nothing stalls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONG = 8  # pieces above 1/8 of the context window may wait
LEAST_TOKENS = 45  # percent of the nominal tokens that a step should have
UNIT = 1 << 16  # of a price: the work of a piece counts price/UNIT times
_SLOWNESS = 32  # steps in which the price would double if twice the budget waited
_LEAST_PRICE, _MOST_PRICE = UNIT >> 8, UNIT << 8


class Waiting(NamedTuple):
    """Long pieces that have arrived, longest first.

    Attributes:
        tokens: of each.
        cost: of each, not ascending.
        due: whether each may wait no longer.
    """

    tokens: Sequence[int]
    cost: Sequence[int]
    due: Sequence[bool]


class Others(NamedTuple):
    """The pieces that enter the step in any case.

    Attributes:
        tokens: of all together.
        cost: of all together.
    """

    tokens: int
    cost: int


def hold(
    waiting: Waiting, others: Others, replicas: int, stages: int, price: int, least_tokens: int
) -> int:
    """How many of the longest pieces wait on.

    Args:
        waiting: the pieces that may wait.
        others: those that may not.
        replicas: R.
        stages: P.
        price: of the work of a waiting piece, in units of :data:`UNIT`.
        least_tokens: that the step should have.
    """
    cost = waiting.cost
    count = len(cost)
    work = others.cost + sum(cost)
    tokens = others.tokens + sum(waiting.tokens)
    heads = sum(cost[:replicas])  # the longest piece of each replica
    held = 0
    best, chosen = 0, -1
    for number in range(count + 1):
        if number:
            piece = number - 1
            if waiting.due[piece]:
                break
            held += cost[piece]
            tokens -= waiting.tokens[piece]
            heads -= cost[piece]
            if piece + replicas < count:
                heads += cost[piece + replicas]
            if tokens < least_tokens:
                break
        longest = cost[number] if number < count else 0
        stall = max(replicas * stages * longest - (work - held), (stages - 1) * heads // 2)
        value = stall + (price * held) // UNIT
        if chosen < 0 or value < best:
            best, chosen = value, number
    return chosen


def next_price(price: int, held: int, budget: int, nominal: int) -> int:
    """The price after a step that left ``held`` tokens waiting.

    Args:
        price: of the step.
        held: tokens that wait now.
        budget: tokens that should wait on average.
        nominal: tokens of a global batch, N·C.
    """
    change = price * (held - budget) // (_SLOWNESS * max(budget, nominal // 20, 1))
    change = min(max(change, -price // 4), price // 4)
    # The second term of the exponential: without it rises and falls by the same share would not
    # cancel out, and more would wait than the budget says.
    change += change * change // (2 * price)
    return min(max(price + change, _LEAST_PRICE), _MOST_PRICE)
