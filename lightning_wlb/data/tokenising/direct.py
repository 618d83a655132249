"""Texts and chats as documents without a command: tokenised once into the user's cache folder.

The folder's name is a fingerprint of the source (path, files, sizes, times of change), the
tokenizer and the options: whatever of these changes gives a new folder. Of several ranks on a node
one does the work, and the others wait for it. Old folders stay until they are removed.

Not for a corpus that takes hours, where nobody watches the first start of a run: ``lightning-wlb
tokenize`` writes the same to a folder of one's choice.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_wlb.data.cache import cache_folders
from lightning_wlb.data.tokenising.job import TokeniseRequest, finished, tokenise


def texts(
    source: str | Path,
    tokenizer: str | Path | None = None,
    column: str | None = None,
    eos: bool | str = True,
) -> Path:
    """The folder with the documents of texts, tokenised now if they were not before.

    Args:
        source: a ``.jsonl``, ``.jsonl.gz``, ``.txt`` or ``.md`` file, or a folder of these.
        tokenizer: a ``tokenizer.json`` file, or the folder or name of a Hugging Face tokenizer.
        column: of JSON lines that holds the text; None: ``text``.
        eos: the end-of-document token: True, the tokenizer's own where it has one; a token, by its
            text; False, none.

    Raises:
        ValueError: no tokenizer is named, or as for :class:`.TokeniseRequest` and
            :func:`.tokenise`.
        TimeoutError: another process tokenises the same and does not get on.
    """
    return _tokenised(TokeniseRequest(source, _named(source, tokenizer), "texts", column, eos))


def chats(
    source: str | Path, tokenizer: str | Path | None = None, column: str | None = None
) -> Path:
    """The folder with the documents of chats, tokenised now if they were not before.

    Args:
        source: a ``.jsonl`` or ``.jsonl.gz`` file, or a folder of these.
        tokenizer: the folder or name of a Hugging Face tokenizer with a chat template.
        column: that holds the messages; None: ``messages``.

    Raises:
        ValueError: no tokenizer is named, or as for :class:`.TokeniseRequest` and
            :func:`.tokenise`.
        TimeoutError: another process tokenises the same and does not get on.
    """
    return _tokenised(TokeniseRequest(source, _named(source, tokenizer), "chats", column))


def _named(source: str | Path, tokenizer: Any) -> str:
    if not tokenizer:
        raise ValueError(
            f"The documents {str(source)!r} need a tokenizer. Name a tokenizer.json file, or the"
            " folder or name of a Hugging Face tokenizer, as tokenizer=... beside them."
        )
    return str(tokenizer)


def _tokenised(request: TokeniseRequest) -> Path:
    identity = request.identity()
    source = Path(request.source).resolve()
    key = hashlib.sha256(json.dumps([str(source), identity], sort_keys=True).encode()).hexdigest()
    folder = _cache_folder() / f"{source.stem}-{key[:16]}"
    if finished(folder, identity) is None:
        rank_zero_info(f"Tokenising {source} into {folder}, once. {request.describe()}")
        tokenise(request, folder)
    return folder


def _cache_folder() -> Path:
    for folder in cache_folders():
        try:
            (folder / "documents").mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder / "documents", os.W_OK):
            return folder / "documents"
    raise ValueError(
        f"None of the cache folders {', '.join(map(str, cache_folders()))} can be written to."
        " Tokenise by the command (lightning-wlb tokenize) and give its folder as documents."
    )
