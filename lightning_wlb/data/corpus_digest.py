"""A digest of some documents of a store, by which ranks find out that they read different copies.

Plans agree where lengths do, and a rank reads only its own rows. So nodes whose copies of a corpus
differ in their tokens (another tokenizer, a file that was changed) would train on a mixture of
both. With the first step of every pass over the documents each rank hashes the beginnings of some
documents, spread over the store, and the digests are compared in the exchange that compares plans.

Cost: ``DOCUMENTS`` reads of at most ``TOKENS`` tokens for each store, once a pass, in the
loader worker. Not a proof: copies that differ elsewhere pass.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from lightning_wlb.data.documents import DocumentStore
from lightning_wlb.data.mixture import MixedDocuments
from lightning_wlb.data.reading import read_mask, read_tokens

DOCUMENTS = 16
TOKENS = 256


class Sample(NamedTuple):
    """What was read of a store.

    Attributes:
        store: how messages call the store; may differ from rank to rank.
        digest: 63 bits of its vocabulary, and of some documents' tokens and masks.
    """

    store: str
    digest: int


def samples_of(store: DocumentStore) -> tuple[Sample, ...]:
    """A sample of a store, or of each store of a mixture.

    Raises:
        ValueError: what the store returns is not what it said.
    """
    stores = store.stores if isinstance(store, MixedDocuments) else (store,)
    return tuple(Sample(repr(each), _digest(each)) for each in stores)


def _digest(store: DocumentStore) -> int:
    sha = hashlib.sha256(repr(store.vocab_size).encode())
    last = len(store.lengths) - 1
    for document in sorted({round(last * part / (DOCUMENTS - 1)) for part in range(DOCUMENTS)}):
        stop = min(TOKENS, int(store.lengths[document]))
        sha.update(read_tokens(store, document, 0, stop, store.vocab_size).tobytes())
        mask = read_mask(store, document, 0, stop)
        sha.update((np.ones(stop, np.bool_) if mask is None else mask).tobytes())
    return int.from_bytes(sha.digest()[:8], "big") >> 1
