"""Several stores as one, mixed in given proportions of tokens.

:class:`MixedDocuments` numbers the documents of its stores one store after another. Its ``shares``
tell the planner what to take from each store (:mod:`lightning_wlb.planning.mixture` defines the
order and an epoch). If a store is passed several times, its documents have other numbers in each
pass, above those of earlier passes; every method here accepts them.

Cost: 8 bytes for each document; a read looks up the store and then reads from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_wlb.data.stores.document_store import (
    DocumentStore,
    DocumentSubset,
    RenumberedDocuments,
)
from lightning_wlb.planning.mixture import StoreShare


class MixedDocuments(RenumberedDocuments):
    """Documents of several stores, in the proportions of a mixture.

    ``shares`` say what is taken from each of the ``stores``.

    Raises:
        ValueError: no stores, or two of the same name.
    """

    def __init__(self, stores: Sequence[DocumentStore], shares: Sequence[StoreShare]) -> None:
        assert [len(store.lengths) for store in stores] == [each.documents for each in shares]
        names = [share.name for share in shares]
        if not stores or len(set(names)) < len(names):
            raise ValueError(
                f"A mixture of stores named {', '.join(names) or '(none)'}: it needs stores, and"
                " for each a name of its own (name: ...)."
            )
        self.stores, self.shares = tuple(stores), tuple(shares)
        self.lengths = np.concatenate([np.asarray(store.lengths, np.int64) for store in stores])
        self._first = np.cumsum([0, *(share.documents for share in shares)])
        known = [store.vocab_size for store in stores if store.vocab_size is not None]
        # Not known unless it is known for every store.
        self.vocab_size: Any = max(known) if len(known) == len(stores) else None

    def name_of(self, document: int) -> str:
        """The name of a document in errors: its number in the store, and the store's name here."""
        store, own = self._find(document)
        return f"document {own} of {self.shares[self.stores.index(store)].name}, {store!r},"

    def subset(self, numbers: npt.NDArray[np.int64]) -> MixedDocuments:
        """The same mixture with only some documents, given by strictly ascending numbers.

        Raises:
            ValueError: no document of some store is left.
        """
        bounds = np.searchsorted(numbers, self._first)
        stores, shares = [], []
        for place, (store, share) in enumerate(zip(self.stores, self.shares, strict=True)):
            left = numbers[bounds[place] : bounds[place + 1]] - self._first[place]
            if not len(left):
                raise ValueError(
                    f"No document of {share.name} is left in the mixture, of {share.documents}."
                    " Hold fewer documents out, or give validation documents of their own."
                )
            stores.append(DocumentSubset(store, left))
            shares.append(share._replace(documents=len(left)))
        return MixedDocuments(stores, shares)

    def describe(self) -> str:
        """The mixture in words."""
        weights = sum(share.weight for share in self.shares)
        return "Mixture, in shares of the tokens: " + "; ".join(
            f"{share.name} {share.weight / weights:.1%} ({share.documents} documents,"
            f" {'repeated' if share.repeat else 'once an epoch'})"
            for share in self.shares
        )

    def _find(self, document: int) -> tuple[DocumentStore, int]:
        document %= len(self.lengths)
        place = int(np.searchsorted(self._first, document, side="right")) - 1
        return self.stores[place], document - int(self._first[place])

    def __repr__(self) -> str:
        return f"MixedDocuments({', '.join(map(repr, self.stores))})"
