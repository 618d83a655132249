"""Several stores as one, mixed in given proportions of tokens.

:class:`MixedDocuments` numbers the documents of its stores one store after another, and says by
its ``shares`` what a planner shall take of each (:mod:`lightning_wlb.planning.mixture` has the
order, and what an epoch is). Where a store is passed several times, the documents of a later pass
have numbers of their own, above those of the passes before it; every method here understands them.

Cost: 8 bytes for each document; reading is a look-up of the store and then the store's own.
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

    ``shares`` say what is taken of each of the ``stores``.

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
        # Not known before they are read where it is not known of every store.
        self.vocab_size: Any = max(known) if len(known) == len(stores) else None

    def name_of(self, document: int) -> str:
        """How errors call a document: by the store's name in the mixture and its number there."""
        store, own = self._find(document)
        return f"document {own} of {self.shares[self.stores.index(store)].name}, {store!r},"

    def subset(self, numbers: npt.NDArray[np.int64]) -> MixedDocuments:
        """The same mixture of some of the documents, given by ascending numbers, each once.

        Raises:
            ValueError: no document of a store is left.
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
