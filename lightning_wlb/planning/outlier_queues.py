"""Which pieces enter a step: the multi-level outlier queues of WLB-LLM section 4.2.

A piece with more work than short documents can match unbalances every micro-batch it is in, unless
each of the others gets one like it. So pieces of at least L_1 tokens wait: queue i holds those with
L_i <= tokens < L_{i+1}, first in, first out, and when it has N pieces, one for each micro-batch,
the N oldest enter the step together (Algorithm 1, lines 3-15). At the end of an epoch what still
waits is drained, oldest first.

The price is delay: more queues hold pieces of more equal work, and hold them longer. Not for
documents whose lengths are much alike, nor for runs of a few steps, in which queues hardly fill.

Cost: O(P + queues) a step for P pieces. All functions are pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.plan import Piece, piece_counts


def thresholds_from_lengths(
    lengths: NDArray[np.int64], window: int, queues: int, work: Callable[[int], int]
) -> tuple[int, ...]:
    """Thresholds L_1 < ... < L_n for the pieces of a document store.

    The fair share of a micro-batch is the work of C tokens of average documents. A piece above
    it cannot be balanced within its step, however short its neighbours are; a piece at 1/n of
    it still needs n - 1 like it. So L_1 is the length whose work is 1/n of the fair share. In
    experiments this was about as even as the best other L_1, with less delay; how thresholds are
    spaced mattered less, so they are spaced evenly in tokens from L_1 to C.

    Args:
        lengths: tokens of each document of the store; longer ones count as pieces of C.
        window: C, the longest piece.
        queues: n; 0 for no delay.
        work: cost of a piece from its tokens, an integer that grows with them.

    Returns:
        At most n thresholds (fewer where the range from L_1 to C has not n lengths).
    """
    if queues == 0:
        return ()
    total = sum(count * work(tokens) for tokens, count in piece_counts(lengths, window).items())
    tokens = int(lengths.sum())
    # work(L_1) >= window · (total / tokens) / queues, in integers.
    first = 1 + bisect_left(
        range(1, window + 1), window * total, key=lambda length: work(length) * tokens * queues
    )
    first = min(first, window)
    spaced = (first + (window - first) * index // queues for index in range(queues))
    return tuple(sorted(set(spaced)))


def check_thresholds(thresholds: Sequence[int], window: int) -> None:
    """Raise ValueError unless thresholds increase strictly, from at least 1 to at most C."""
    rising = all(low < high for low, high in pairwise(thresholds))
    if not rising or (thresholds and (thresholds[0] < 1 or thresholds[-1] > window)):
        raise ValueError(
            f"thresholds={tuple(thresholds)}: the outlier queues' thresholds must increase"
            f" strictly, from at least 1 to at most the context window of {window} tokens, which"
            " bounds every piece. Leave them out to set them from the length distribution."
        )


def release(
    arrivals: Sequence[Piece],
    queues: Sequence[Sequence[Piece]],
    thresholds: Sequence[int],
    count: int,
) -> tuple[list[Piece], list[list[Piece]]]:
    """Let a global batch arrive, and release what may enter the step.

    Args:
        arrivals: pieces of the global batch, in order of arrival.
        queues: waiting pieces of each queue, oldest first; not changed.
        thresholds: L_i, the least tokens of a piece of queue i; as many as queues.
        count: N, pieces at which a queue releases, and how many it then releases.

    Returns:
        The released pieces, and the queues that remain. A queue releases once per call.
    """
    held = [list(queue) for queue in queues]
    released = []
    for piece in arrivals:
        level = bisect_right(thresholds, piece.tokens)
        if level:
            held[level - 1].append(piece)
        else:
            released.append(piece)
    for queue in held:
        if len(queue) >= count:
            released.extend(queue[:count])
            del queue[:count]
    return released, held


def overdue(
    queues: Sequence[Sequence[Piece]], latest: int
) -> tuple[list[Piece], list[list[Piece]]]:
    """Split waiting pieces by arrival: those of step ``latest`` or before, and the queues left."""
    late = [piece for queue in queues for piece in queue if piece.arrival <= latest]
    left = [[piece for piece in queue if piece.arrival > latest] for queue in queues]
    return late, left


def oldest_first(held: Sequence[Piece], tokens: int) -> tuple[list[Piece], list[Piece]]:
    """The oldest pieces of at most ``tokens`` tokens together, and the rest.

    The oldest piece is among the first in any case. Both are in order of (arrival, document,
    origin), whatever the order of ``held``.
    """
    order = sorted(held, key=lambda piece: (piece.arrival, piece.document, piece.origin))
    taken = 0
    for index, piece in enumerate(order):
        taken += piece.tokens
        if taken > tokens and index:
            return order[:index], order[index:]
    return order, []
