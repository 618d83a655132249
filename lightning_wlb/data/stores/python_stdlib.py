"""The standard library of the running Python as documents.

It is real text with heavy-tailed lengths on every machine with Python, for demos and tests.

The documents are tokenised once, into an Arrow file in the user's cache folder, which is mapped
into memory. The folder's name includes the Python version, the settings and a fingerprint of the
source tree (paths, sizes and times of change).

Cost: the first use takes seconds to tens of seconds (parsing, training, encoding), later uses one
walk over the source tree. It is 30 MB of Python, too little to train a useful model.
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
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from lightning_wlb.argument_checks import choice, whole
from lightning_wlb.data.cache import built_once, fingerprint, shown
from lightning_wlb.data.stores.arrow_and_parquet import ArrowDocuments
from lightning_wlb.data.tokenising.texts import Document
from lightning_wlb.data.tokenising.tokenised_folder import write_shard

_CACHE_VERSION = 3
_FILE = "documents.arrow"
_DEFAULT_BPE_VOCABULARY = 4096
_TRAINING_SAMPLE_CHARACTERS = 2_000_000
_ENCODE_AT_ONCE = 256
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


class StdlibDocuments(ArrowDocuments):
    """The top-level functions and classes of the Python sources under a directory.

    They include their decorators, in order of path and line; files that do not parse are left out.

    Args:
        tokenizer: ``"bytes"`` (each byte is a token, 256 tokens) or ``"bpe"`` (byte-level byte-pair
            encoding, trained on a sample of the same documents).
        vocab_size: tokens of the byte-pair vocabulary, at least 256; None: 4096.
        directory: of sources, without its ``site-packages``; None: this Python's standard library.

    Raises:
        ValueError: an unknown tokenizer or vocabulary size, or a directory without documents.
    """

    vocab_size: int

    def __init__(
        self,
        tokenizer: Literal["bytes", "bpe"] = "bytes",
        vocab_size: int | None = None,
        directory: str | Path | None = None,
    ) -> None:
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
        folder = _cached(sources, tokenizer, wanted)
        if tokenizer == "bpe":
            wanted = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
        super().__init__(folder / _FILE, vocab_size=wanted)
        self.name = f"StdlibDocuments(tokenizer={tokenizer!r})"


def _cached(directory: Path, tokenizer: str, vocab_size: int) -> Path:
    """The folder with the arrays, which is built if there is none."""
    files = []
    for folder, below, names in os.walk(directory):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = sorted(filter(Path.is_file, files), key=lambda path: path.as_posix())
    key = (
        f"stdlib-{platform.python_implementation().lower()}{platform.python_version()}"
        f"-{tokenizer}{vocab_size}-v{_CACHE_VERSION}-{fingerprint(files, directory)}"
    )
    return built_once(key, lambda folder: _build(folder, directory, files, tokenizer, vocab_size))


def _build(
    folder: Path, directory: Path, files: list[Path], tokenizer: str, vocab_size: int
) -> None:
    texts: list[bytes] = []
    for path in shown(files, "Reading Python sources"):
        texts += _definitions(path.read_bytes())
    if not texts:
        raise ValueError(f"StdlibDocuments({directory}) holds no documents: no Python is in it.")
    model: ByteLevelBPETokenizer | None = None
    if tokenizer == "bpe":
        model = _train([text.decode(errors="replace") for text in texts], vocab_size)
        model.save(str(folder / "tokenizer.json"))
    write_shard(folder / _FILE, _encoded(model, texts), masked=False, vocab_size=vocab_size)


def _definitions(source: bytes) -> list[bytes]:
    """Top-level functions and classes with their decorators, as whole lines."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []  # Test data of the compiler has syntax errors on purpose.
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


def _encoded(
    model: ByteLevelBPETokenizer | None, texts: list[bytes]
) -> Iterator[list[Document | None]]:
    """The documents, encoded by the model, or as bytes if there is none."""
    for first in shown(range(0, len(texts), _ENCODE_AT_ONCE), "Encoding documents"):
        some = texts[first : first + _ENCODE_AT_ONCE]
        if model is None:
            rows: list[Any] = [np.frombuffer(text, np.uint8) for text in some]
        else:
            decoded = [text.decode(errors="replace") for text in some]
            rows = [each.ids for each in model.encode_batch(decoded)]
        yield [Document(np.array(row, np.int32)) for row in rows]
