"""Document lengths for the command line: a name, a generator, a file of lengths, or a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml

from lightning_wlb.data.mixture import MixedDocuments
from lightning_wlb.data.open_documents import documents
from lightning_wlb.data.stdlib import StdlibDocuments
from lightning_wlb.planning.workloads import documents_for, generator_a

Lengths = npt.NDArray[np.int64]

STORES: dict[str, Callable[[], Lengths]] = {
    "stdlib": lambda: StdlibDocuments(unit="file").lengths,
    "stdlib-definitions": lambda: StdlibDocuments(unit="definition").lengths,
}
"""Document stores by name: the files of Python's standard library in bytes, and its top-level
functions and classes, which ``WLBDataModule("stdlib")`` trains on."""

GENERATOR_A = "generator-a"

STORE_FILES = (".arrow", ".feather", ".ipc", ".parquet", ".bin", ".idx", ".jsonl", ".jsonl.gz")
"""Endings of files that hold documents; any other file is one of lengths."""


def load_lengths(
    source: str, *, context_window: int, micro_batches: int, steps: int, seed: int
) -> Lengths:
    """Lengths in tokens, int64 [documents].

    Args:
        source: a name in :data:`STORES`, ``"generator-a"``, or the path of a ``.npy`` file with
            integers or of a text file with one integer per line or word. A file of
            :data:`STORE_FILES`, a mapping such as ``{tokens: tokens.npy, offsets: offsets.npy}`` in
            YAML, and what is no file, is opened as documents.
        context_window: bounds the generator's documents.
        micro_batches: of a global batch; sizes the generator's sample.
        steps: likewise.
        seed: of the generator.

    Raises:
        ValueError: a file that cannot be read or holds something other than lengths, documents of
            an unknown kind, or a mixture.
    """
    if source in STORES:
        return STORES[source]()
    if source == GENERATOR_A:
        count = documents_for(steps, micro_batches, context_window)
        # In short windows documents are shorter than on average, and a few steps' worth is further
        # from the mean: then the last step would be the rest of an epoch.
        while True:
            lengths = generator_a(count, context_window, seed)
            tokens = int(lengths.sum())
            # A step passes N·C tokens by half of this, on average.
            beyond = int((lengths**2).sum()) // tokens
            if tokens >= steps * (micro_batches * context_window + beyond):
                return lengths
            count *= 2
    path = Path(source)
    if path.name.endswith(STORE_FILES) or not path.is_file():
        try:
            return _lengths_of_documents(source)
        except (ValueError, yaml.YAMLError) as error:
            named = ", ".join([*STORES, GENERATOR_A])
            raise ValueError(
                f"--lengths: {error} Or give {named}, or a file of lengths."
            ) from error
    known = f"--lengths takes {', '.join([*STORES, GENERATOR_A])}, a file of lengths, or documents"
    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
        else:
            values = np.array([int(word) for word in path.read_text(encoding="utf-8").split()])
    except OSError as error:
        raise ValueError(f"--lengths {source}: {error.strerror or error}. {known}.") from error
    except (ValueError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(
            f"--lengths {source} is not a list of lengths: {error}. {known}: integers, in .npy or"
            " as text with one per line."
        ) from error
    if values.ndim != 1 or values.dtype.kind not in "iu" or len(values) == 0:
        raise ValueError(
            f"--lengths {source} holds an array of {values.dtype} with shape {values.shape}, but"
            " lengths are integers in one dimension, at least one."
        )
    return values.astype(np.int64)


def _lengths_of_documents(source: str) -> Lengths:
    store = documents(yaml.safe_load(source) if source.lstrip().startswith("{") else source)
    if isinstance(store, MixedDocuments):
        raise ValueError(
            "a mixture takes its stores in other proportions than those of their documents, which"
            " plan does not know. Give its stores one by one."
        )
    return store.lengths
