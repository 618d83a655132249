"""Texts and chats as documents without a command: tokenised once into the user's cache folder.

A specification is a mapping, as Python or YAML have it::

    {"texts": "corpus.jsonl", "tokenizer": "tokenizer.json"}
    {"chats": "chats.jsonl", "tokenizer": "path/to/model", "column": "conversation"}

The folder's name is a fingerprint of the source's files (path, sizes, times of change), the
tokenizer and the options: whatever of these changes gives a new folder. Of several ranks on a node
one does the work, and the others wait for it. Old folders stay until they are removed.

Not for a corpus that takes hours, where nobody watches the first start of a run: ``lightning-wlb
tokenize`` writes the same to a folder of one's choice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from platformdirs import user_cache_dir

from lightning_wlb.data.tokenising.job import COLUMNS, Kind, Request, finished, tokenise

_OPTIONS = {"texts": ("tokenizer", "column", "eos"), "chats": ("tokenizer", "column")}


def is_texts(spec: Any) -> bool:
    """Whether this is a specification of texts or chats."""
    return isinstance(spec, Mapping) and any(kind in spec for kind in COLUMNS)


def tokenised(spec: Mapping[str, Any]) -> Path:
    """The folder with the documents of a specification, tokenised now if it was not before.

    Args:
        spec: ``texts`` or ``chats`` with the path of a source, ``tokenizer``, and optionally
            ``column`` and for texts ``eos``, as in :class:`.Request`.

    Raises:
        ValueError: other entries than these, or as for :class:`.Request` and :func:`.tokenise`.
        TimeoutError: another process tokenises the same and does not get on.
    """
    request = _request(spec)
    identity = request.identity()
    source = Path(request.source).resolve()
    key = hashlib.sha256(json.dumps([str(source), identity], sort_keys=True).encode()).hexdigest()
    folder = Path(user_cache_dir("lightning_wlb"), "documents", f"{source.stem}-{key[:16]}")
    if finished(folder, identity) is None:
        rank_zero_info(f"Tokenising {source} into {folder}, once. {request.encoder.describe()}")
        tokenise(request, folder)
    return folder


def _request(spec: Mapping[str, Any]) -> Request:
    kinds: list[Kind] = [kind for kind in ("texts", "chats") if kind in spec]
    if len(kinds) != 1:
        raise ValueError(
            f"documents={dict(spec)!r} name {' and '.join(kinds) or 'no source'}. Give one of"
            " texts and chats; several stores are a mixture."
        )
    (kind,) = kinds
    unknown = [name for name in spec if name != kind and name not in _OPTIONS[kind]]
    if unknown or "tokenizer" not in spec:
        raise ValueError(
            f"documents={dict(spec)!r} "
            + (f"have {', '.join(map(repr, unknown))}" if unknown else "lack a tokenizer")
            + f". With {kind!r} go {', '.join(_OPTIONS[kind])}, and tokenizer is needed."
        )
    return Request(
        source=spec[kind],
        tokenizer=spec["tokenizer"],
        kind=kind,
        column=spec.get("column"),
        eos=spec.get("eos", True),
    )
