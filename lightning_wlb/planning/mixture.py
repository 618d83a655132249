"""The order of documents of several stores, in given proportions of tokens.

The next document is taken from the store with the fewest tokens so far relative to its weight
(tokens/weight, the first of equals), so that a store's share of the tokens differs from its weight
by about one document at most. Each store has an order of its own, a permutation by
``numpy.random.default_rng((seed, number of the store, pass))``, and goes through all of it:

* A store that repeats begins its next pass, in a new order, as soon as it runs out, at any time.
* A store that does not repeat has one pass in every epoch of the mixture. When it has run out, the
  others go on, with unchanged weights relative to each other.

An epoch of the mixture ends when every store that does not repeat has run out. If all stores
repeat, it ends when each has given as many documents as it holds (one pass of the slowest store).

A document may be drawn again while it still waits for its step, so it has another number in each
pass: document d of D has the number ``d + D·pass``.

Cost: O(stores) for a document, a permutation of a store per pass. State: five integers per store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.argument_checks import whole
from lightning_wlb.planning.global_batches import (
    GlobalBatches,
    Stream,
    StreamPosition,
    document_numbers,
)


class StoreShare(NamedTuple):
    """How a mixture takes documents of one store."""

    name: str  #: unique name of the store
    documents: int  #: how many documents the store holds
    weight: float  #: its proportion of the tokens, relative to the weights of the others
    repeat: bool = True  #: whether it begins another pass when it runs out


class _Standing(NamedTuple):
    """Which documents of a store have been drawn."""

    passes: int = 0  # complete passes; where the store does not repeat, the mixture's epoch
    position: int = 0  # documents drawn in this pass
    drawn: int = 0  # documents drawn in this epoch of the mixture
    tokens: int = 0  # of the documents drawn in this epoch


class MixedBatches(GlobalBatches):
    """The global batches of one epoch of a mixture after another.

    Args:
        shares: how documents of each store are taken.
        lengths: tokens of each document of all stores, one store after another.
        stream: as for :class:`.GlobalBatches`.
    """

    def __init__(
        self, shares: Sequence[StoreShare], lengths: NDArray[np.int64], stream: Stream
    ) -> None:
        self._shares = tuple(shares)
        self._all_lengths = lengths
        self._first = np.concatenate(([0], np.cumsum([share.documents for share in shares])))
        assert self._first[-1] == len(lengths)
        self._standings = tuple(_Standing() for _ in shares)
        self._orders: dict[int, tuple[int, NDArray[Any]]] = {}
        super().__init__(lengths[:0], stream)

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch: stores that do not repeat restart, the others continue."""
        super().start_epoch(epoch)
        self._standings = tuple(
            _Standing(standing.passes, standing.position) if share.repeat else _Standing(epoch)
            for share, standing in zip(self._shares, self._standings, strict=True)
        )
        self._make_orders()

    @property
    def exhausted(self) -> bool:
        """Whether the epoch's last global batch has been drawn."""
        return self._is_over(self._standings)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch and every store stand, in plain integers."""
        mixture = {
            share.name: {"documents": share.documents, **standing._asdict()}
            for share, standing in zip(self._shares, self._standings, strict=True)
        }
        return {**super().state_dict(), "mixture": mixture}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._lengths = self._lengths[:0]  # forgets the last batch drawn
        super().load_state_dict(state)
        saved = [state["mixture"][share.name] for share in self._shares]
        self._standings = tuple(
            _Standing(*(whole(name, each[name], 0) for name in _Standing._fields)) for each in saved
        )
        for share, (passes, position, drawn, _) in zip(self._shares, self._standings, strict=True):
            # A store that repeats begins its next pass at once, so position == documents is wrong.
            beyond = position > share.documents - share.repeat or passes >= 1 << 31
            if beyond or (not share.repeat and drawn != position):
                raise ValueError(f"no run stands at document {position} of {share.name}")
        self._make_orders()
        offset = self._at.offset
        if offset and (self.exhausted or offset >= self._drawn(self._standings)[1]):
            raise ValueError(f"no run stands at token {offset} of the next document")

    def _after(self, at: StreamPosition) -> tuple[list[tuple[int, int, int]], StreamPosition]:
        """The pieces of the global batch at a position, and where it ends.

        As many documents are drawn as the batch may need; documents not taken are put back.
        """
        numbers: list[int] = []
        lengths: list[int] = []
        standings = [self._standings]
        tokens = -at.offset
        while tokens < self._stream.tokens and not self._is_over(standings[-1]):
            number, length, standing = self._drawn(standings[-1])
            numbers.append(number)
            lengths.append(length)
            standings.append(standing)
            tokens += length
        self._order, self._lengths = np.arange(len(numbers)), np.array(lengths, np.int64)
        pieces, at = super()._after(at)
        self._standings = standings[at.position]
        return [(numbers[index], origin, stop) for index, origin, stop in pieces], at._replace(
            position=0
        )

    def _is_over(self, standings: tuple[_Standing, ...]) -> bool:
        pairs = list(zip(self._shares, standings, strict=True))
        once = [each for each in pairs if not each[0].repeat]
        return all(standing.drawn >= share.documents for share, standing in once or pairs)

    def _drawn(self, standings: tuple[_Standing, ...]) -> tuple[int, int, tuple[_Standing, ...]]:
        """Number and tokens of the next document, and the state of the stores after it."""
        chosen = min(
            (
                (standing.tokens / share.weight, index)
                for index, (share, standing) in enumerate(zip(self._shares, standings, strict=True))
                if share.repeat or standing.drawn < share.documents
            )
        )[1]
        share, (passes, position, drawn, tokens) = self._shares[chosen], standings[chosen]
        document = int(self._first[chosen]) + self._in_store(chosen, passes, position)
        length = int(self._all_lengths[document])
        after = _Standing(passes, position + 1, drawn + 1, tokens + length)
        if share.repeat and after.position == share.documents:
            after = after._replace(passes=passes + 1, position=0)
        number = document + passes * len(self._all_lengths)
        return number, length, (*standings[:chosen], after, *standings[chosen + 1 :])

    def _make_orders(self) -> None:
        """Make the orders of all stores' passes now; many millions of documents take seconds."""
        for chosen, standing in enumerate(self._standings):
            self._in_store(chosen, standing.passes, 0)

    def _in_store(self, chosen: int, passes: int, position: int) -> int:
        if not self._stream.shuffle:
            return position
        known, order = self._orders.get(chosen, (-1, None))
        if order is None or known != passes:
            order = document_numbers(self._shares[chosen].documents)
            np.random.default_rng((self._stream.seed, chosen, passes)).shuffle(order)
            self._orders[chosen] = passes, order
        return int(order[position])
