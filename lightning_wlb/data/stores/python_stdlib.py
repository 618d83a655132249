"""The standard library of the running Python as documents.

Real text with a heavy-tailed length distribution that is on every machine with Python, for
demonstrations and tests.

The documents are tokenised once, into arrays in the user's cache folder, and opened as memory
maps. The folder's name holds the Python version, the settings and a fingerprint of the source tree
(paths, sizes and times of change).

Cost: the first use takes seconds to tens of seconds (parsing, training, encoding), later ones
one walk over the source tree. Not for training a useful model: it is 30 MB of Python.
"""

from __future__ import annotations

import ast
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from lightning_wlb.argument_checks import choice, whole
from lightning_wlb.data.cache import built_once, fingerprint, shown
from lightning_wlb.data.stores.document_store import check_lengths
from lightning_wlb.data.stores.flat_and_megatron import FlatDocuments

_CACHE_VERSION = 2
_DEFAULT_BPE_VOCABULARY = 4096
_TRAINING_SAMPLE_CHARACTERS = 2_000_000
_ENCODE_AT_ONCE = 256
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


class StdlibDocuments(FlatDocuments):
    """Documents cut from the Python sources under a directory, in order of path and line.

    Args:
        unit: ``"definition"`` (top-level functions and classes, decorators included; files that
            do not parse are left out) or ``"file"`` (every non-empty ``.py`` file).
        tokenizer: ``"bytes"`` (one byte one token, 256 tokens) or ``"bpe"`` (byte-level
            byte-pair encoding, trained on a sample of the same documents).
        vocab_size: tokens of the byte-pair vocabulary, at least 256; None: 4096.
        directory: where to look for sources; None: the standard library of this Python.
            ``site-packages`` below it are left out.

    Raises:
        ValueError: an unknown unit or tokenizer, a vocabulary that the tokenizer cannot have,
            or a directory without documents.
    """

    vocab_size: int

    def __init__(
        self,
        unit: Literal["definition", "file"] = "definition",
        tokenizer: Literal["bytes", "bpe"] = "bytes",
        vocab_size: int | None = None,
        directory: str | Path | None = None,
    ) -> None:
        choice("StdlibDocuments: unit", unit, ("definition", "file"))
        choice("StdlibDocuments: tokenizer", tokenizer, ("bytes", "bpe"))
        wanted = 256 if tokenizer == "bytes" else _DEFAULT_BPE_VOCABULARY
        if vocab_size is not None:
            wanted = whole("StdlibDocuments: vocab_size", vocab_size, 256)
        if tokenizer == "bytes" and wanted != 256:
            raise ValueError(
                f"StdlibDocuments: vocab_size={vocab_size} with tokenizer='bytes', which has 256"
                " tokens. Leave vocab_size out, or choose tokenizer='bpe'."
            )
        sources = Path(directory or sysconfig.get_paths()["stdlib"])
        folder = _cached(sources, unit, tokenizer, wanted)
        if tokenizer == "bpe":
            wanted = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
        super().__init__(folder / "tokens.npy", folder / "offsets.npy", vocab_size=wanted)
        self.name = f"StdlibDocuments(unit={unit!r}, tokenizer={tokenizer!r})"


def _cached(directory: Path, unit: str, tokenizer: str, vocab_size: int) -> Path:
    """The folder with the arrays, built where there is none."""
    files = _source_files(directory)
    key = (
        f"stdlib-{platform.python_implementation().lower()}{platform.python_version()}-{unit}"
        f"-{tokenizer}{vocab_size}-v{_CACHE_VERSION}-{fingerprint(files, directory)}"
    )
    return built_once(
        key, lambda folder: _build(folder, directory, files, unit, tokenizer, vocab_size)
    )


def _source_files(directory: Path) -> list[Path]:
    """Non-empty Python files below the directory, sorted by path."""
    files = []
    for folder, below, names in os.walk(directory):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [path for path in files if path.is_file() and path.stat().st_size > 0]
    return sorted(files, key=lambda path: path.relative_to(directory).as_posix())


def _build(
    folder: Path, directory: Path, files: list[Path], unit: str, tokenizer: str, vocab_size: int
) -> None:
    texts: list[bytes] = []
    for path in shown(files, f"Reading Python sources ({unit}s)"):
        source = path.read_bytes()
        texts += [source] if unit == "file" else _definitions(source)
    check_lengths(
        np.array([len(text) for text in texts], np.int64), f"StdlibDocuments({directory})"
    )
    if tokenizer == "bytes":
        lengths = [len(text) for text in texts]
        tokens = np.frombuffer(b"".join(texts), np.uint8)
    else:
        model = _train([_decoded(text) for text in texts], vocab_size)
        model.save(str(folder / "tokenizer.json"))
        encoded = list(_encode(model, texts, np.uint16 if vocab_size <= 1 << 16 else np.uint32))
        lengths = [len(document) for document in encoded]
        tokens = np.concatenate(encoded)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))


def _definitions(source: bytes) -> list[bytes]:
    """Top-level functions and classes with their decorators, as whole lines."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []  # Test data of the compiler is wrong on purpose.
    lines = source.splitlines(keepends=True)
    found = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.append(b"".join(lines[first - 1 : node.end_lineno]))
    return found


def _train(texts: list[str], vocab_size: int) -> ByteLevelBPETokenizer:
    """Byte-level byte-pair encoding, trained on every k-th document."""
    characters = sum(len(text) for text in texts)
    every = max(1, -(-characters // _TRAINING_SAMPLE_CHARACTERS))
    model = ByteLevelBPETokenizer(add_prefix_space=False)
    model.train_from_iterator(texts[::every], vocab_size, min_frequency=0, show_progress=False)
    return model


def _encode(
    model: ByteLevelBPETokenizer, texts: list[bytes], dtype: Any
) -> Iterator[npt.NDArray[Any]]:
    starts = range(0, len(texts), _ENCODE_AT_ONCE)
    for first in shown(starts, "Encoding documents"):
        chunk = texts[first : first + _ENCODE_AT_ONCE]
        for encoding in model.encode_batch([_decoded(text) for text in chunk]):
            yield np.array(encoding.ids, dtype)


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")
