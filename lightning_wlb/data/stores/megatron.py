"""Megatron's indexed datasets: tokens in ``NAME.bin``, and their index in ``NAME.idx``.

The index has a header (magic, version 1, type of the tokens, counts), the lengths of the sequences
(int32), their first bytes (int64), and the number of the first sequence of each document (int64,
one entry more than documents). A document consists of consecutive sequences. Multimodal datasets,
whose index also has a mode for each sequence, are refused because of the index's size.

Cost: opening reads the index, 12 bytes for each sequence and 8 for each document, but no tokens.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_wlb.data.stores.document_store import Array, CheckedDocuments
from lightning_wlb.file_checks import check_regular
from lightning_wlb.model_folder_checks import check_beside

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class MegatronDocuments(CheckedDocuments):
    """The documents of a ``.bin`` file with its ``.idx``.

    Args:
        source: the files' common path, without or with a suffix; or a folder with one such pair.
        vocab_size: tokens are in ``[0, vocab_size)``; None: not known.

    Raises:
        ValueError: a missing or truncated file, or an index that contradicts itself or the tokens.
    """

    def __init__(self, source: str | Path, vocab_size: int | None = None) -> None:
        stem = _stem(Path(source))
        tokens, index = Path(f"{stem}.bin"), Path(f"{stem}.idx")
        check_beside(index, tokens)
        check_beside(tokens, index)
        name = f"MegatronDocuments({stem})"
        self._index = _index(index)
        self._array = _mapped(tokens, self._index.dtype)
        lengths = _document_lengths(self._index, self._array, index, tokens)
        super().__init__(name, lengths, vocab_size)

    def _tokens(self, row: int, start: int, stop: int) -> Array:
        first = self._index.documents[row]
        begin = int(self._index.pointers[first]) // self._array.itemsize
        return self._array[begin + start : begin + stop]


class _Index(NamedTuple):
    """The contents of an index file."""

    dtype: str  # type of the tokens
    sizes: Array  # tokens of each sequence
    pointers: Array  # where each sequence begins, in bytes
    documents: Array  # first sequence of each document, and at the end the number of sequences


def has_index(path: Path) -> bool:
    """Whether a path names a pair of ``.bin`` and ``.idx`` files, or a folder with one."""
    if path.is_dir():
        if (twin := Path(f"{path}.idx")).exists():  # whose place a stranger's folder would take
            check_beside(twin, path)
        return _is_pair(path) or any(path.glob("*.idx"))
    return Path(f"{_stem(path)}.idx").exists()


def _is_pair(stem: Path) -> bool:
    return all(Path(f"{stem}.{end}").exists() for end in ("idx", "bin"))


def _stem(path: Path) -> Path:
    if path.is_dir():
        found = sorted(path.glob("*.idx"))
        if _is_pair(path):
            raise ValueError(f"{path} may mean {path}.idx or {[*found, path / '*'][0]}. Give one.")
        if len(found) != 1:
            raise ValueError(
                f"{path} has {len(found)} .idx files. Give the path of one pair, such as"
                f" {found[0] if found else path / 'NAME'} (several can be a mixture)."
            )
        check_beside(path, found[0])
        path = found[0]
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _mapped(path: Path, dtype: str) -> Array:
    """The numbers of a file, mapped into memory."""
    try:
        check_regular(path)
        return np.asarray(np.memmap(path, dtype, "r"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Check the file.") from error


def _index(path: Path) -> _Index:
    content = _mapped(path, "uint8")
    if len(content) < _HEADER.size or content[: len(_MAGIC)].tobytes() != _MAGIC:
        raise ValueError(
            f"{path} does not begin as an index of Megatron's does (MMIDIDX). Check that it is one;"
            " those of fairseq (TNTIDX) are of another format."
        )
    _, version, code, sequences, documents = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if version != 1 or code not in _TYPES:
        raise ValueError(
            f"{path} is of version {version} with tokens of type {code}. Known are version 1 and"
            f" the types {', '.join(f'{known} ({name})' for known, name in _TYPES.items())}."
        )
    counts = ((sequences, "<i4"), (sequences, "<i8"), (documents, "<i8"))
    expected = _HEADER.size + sum(count * np.dtype(kind).itemsize for count, kind in counts)
    if expected != len(content):
        raise ValueError(
            f"{path} has {len(content)} bytes, but {expected} for the {sequences} sequences and"
            f" {documents} entries of documents that it announces. It is truncated or damaged."
        )
    arrays, at = [], _HEADER.size
    for count, kind in counts:
        arrays.append(np.frombuffer(content, kind, count, at))
        at += arrays[-1].nbytes
    return _Index(_TYPES[code], *arrays)


def _document_lengths(index: _Index, tokens: Array, path: Path, of: Path) -> Array:
    sizes, pointers, documents = index.sizes, index.pointers, index.documents
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if total != len(tokens):
        raise ValueError(
            f"{path} counts {total} tokens, {of} has {len(tokens)} of {index.dtype}. They do not"
            " belong together, or one is truncated."
        )
    wrong = np.flatnonzero((sizes < 0) | (pointers != (ends - sizes) * tokens.itemsize))
    if len(wrong):
        raise ValueError(
            f"{path} is damaged: sequence {int(wrong[0])} has {sizes[wrong[0]]} tokens from byte"
            f" {pointers[wrong[0]]} on; the one before ends elsewhere. Make it again."
        )
    bounds = (int(documents[0]), int(documents[-1])) if len(documents) else (0, 0)
    outside = (documents < 0) | (documents > len(sizes))
    if bounds != (0, len(sizes)) or outside.any() or (np.diff(documents) < 0).any():
        raise ValueError(
            f"{path}: its documents run from sequence {bounds[0]} to {bounds[1]} of {len(sizes)},"
            " or go back. The index is damaged: make it again."
        )
    return np.diff(np.concatenate(([0], ends))[documents])
