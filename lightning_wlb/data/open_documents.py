"""Opens the documents that a user gives: a name, a path, a mapping, sequences or a store.

:data:`KINDS` lists all kinds of documents; another kind is one more entry.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_wlb import file_checks
from lightning_wlb.argument_checks import check_names, flag, number, whole
from lightning_wlb.data.stores.arrow_and_parquet import PARTIAL, ArrowDocuments, ParquetDocuments
from lightning_wlb.data.stores.document_store import DocumentStore, DocumentSubset
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.data.stores.megatron import MegatronDocuments, has_index
from lightning_wlb.data.stores.mixture import MixedDocuments
from lightning_wlb.data.stores.python_stdlib import StdlibDocuments
from lightning_wlb.data.tokenising.sources import LINES, TEXTS, folders_below
from lightning_wlb.data.tokenising.tokenise import TokeniseRequest, tokenised_once
from lightning_wlb.model_folder_checks import check_beside
from lightning_wlb.planning.global_batches import document_numbers
from lightning_wlb.planning.mixture import StoreShare

Documents = str | Path | DocumentStore | Mapping[str, Any] | Sequence[Any]
"""Types that :func:`documents` opens, in the order in which LightningCLI tries them."""

PATH = "path"
"""The entry of a mapping that holds a path; its other entries are the store's options."""


class Kind(NamedTuple):
    """A way to give documents."""

    description: str
    """Its description in errors."""
    fits: Callable[[Any], bool] | None
    """Whether a source is of this kind, by its type and by the names of files, without opening any.
    Paths are given as a Path, or as a list of Paths for a pattern. None: only ``key`` decides."""
    open: Callable[..., DocumentStore]
    """Makes the store from the source and the user's options."""
    key: str | None = None
    """The entry of a mapping that holds the source; its other entries are options."""


def _files(source: Any, *suffixes: str) -> bool:
    """Whether the source is a folder with files of these suffixes, such a file, or several."""
    if isinstance(source, Path) and source.is_dir():
        return any(path.suffix in suffixes for path in source.iterdir())
    paths = source if isinstance(source, list) else [source]
    return bool(paths) and all(
        isinstance(path, Path) and path.suffix in suffixes and path.is_file() for path in paths
    )


def _is_arrow(source: Any) -> bool:
    marks = (PARTIAL, "state.json", "dataset_dict.json")
    marked = isinstance(source, Path) and any((source / mark).exists() for mark in marks)
    return marked or _files(source, ".arrow")


def _is_texts(source: Any) -> bool:
    """Whether the source is a file of texts or chats, or a folder with one."""
    if not isinstance(source, Path):
        return False
    paths = source.iterdir() if source.is_dir() else [source]
    return any(path.name.endswith(LINES + TEXTS) and path.is_file() for path in paths)


def _is_sequences(source: Any) -> bool:
    if isinstance(source, str) or not isinstance(source, Sequence):
        return False
    return not any(isinstance(each, str | Path) for each in source[:1])


def _stdlib(
    name: str, tokenizer: Literal["bytes", "bpe"] = "bytes", vocab_size: int | None = None
) -> StdlibDocuments:
    return StdlibDocuments(tokenizer, vocab_size)


def _texts(
    source: str | Path,
    tokenizer: str | Path = "",
    column: str | None = None,
    eos: bool | str = True,
) -> ArrowDocuments:
    request = TokeniseRequest(source, tokenizer, "texts", column, eos)
    return ArrowDocuments(tokenised_once(request))


def _chats(
    source: str | Path, tokenizer: str | Path = "", column: str | None = None
) -> ArrowDocuments:
    return ArrowDocuments(tokenised_once(TokeniseRequest(source, tokenizer, "chats", column)))


def _mixture(entries: Sequence[Mapping[str, Any]]) -> MixedDocuments:
    """The mixture of a list of mappings, one for each store.

    Each has ``documents``, ``weight`` (its proportion of the tokens), and optionally ``repeat``
    (whether it restarts when it runs out; default True) and ``name`` (in the log and in
    checkpoints; by default the name of its file or folder, or its place in the list).

    Raises:
        ValueError: other entries, a weight that is not a number above 0, or a mixture in a mixture.
    """
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence) or not entries:
        raise ValueError(
            f"mixture={entries!r} is no list of stores. Give [{{documents: ..., weight: 0.7}},"
            " {documents: ..., weight: 0.3}]."
        )
    known, stores, shares = {"documents", "weight", "repeat", "name"}, [], []
    for place, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not {"documents", "weight"} <= set(entry) <= known:
            raise ValueError(
                f"mixture[{place}]={entry!r}: give documents and weight, besides only repeat, name."
            )
        path = _path_of(entry["documents"])
        name = entry.get("name") or (place if path is None else path.stem)
        # Bounded, since with an infinite sum no store would have a share.
        weight = number(f"mixture[{place}]: weight", entry["weight"], 0, 1e18, above=True)
        repeat = flag(f"mixture[{place}]: repeat", entry.get("repeat", True))
        store = documents(entry["documents"])
        if isinstance(store, MixedDocuments):
            raise ValueError(
                f"mixture[{place}] is a mixture itself, whose weights would not count. List its"
                " stores in this mixture, each with its weight times that of the whole."
            )
        stores.append(store)
        shares.append(StoreShare(str(name), len(store.lengths), weight, repeat))
    warn_of_vocabularies(stores)
    return MixedDocuments(stores, shares)


def warn_of_vocabularies(stores: Iterable[DocumentStore | None]) -> None:
    """Warn if two stores are known to have been tokenised with different vocabularies.

    Folders of ``lightning-wlb tokenize`` have a fingerprint of their vocabulary. It is no error,
    because one vocabulary may extend the other.
    """
    first: dict[str, DocumentStore] = {}
    for given in stores:
        for store in given.stores if isinstance(given, MixedDocuments) else [given]:
            if store is not None and (vocabulary := getattr(store, "vocabulary", None)):
                first.setdefault(str(vocabulary), store)
    if len(first) > 1:
        one, other, *_ = first.values()
        warnings.warn(
            f"{one!r} and {other!r} were tokenised with other vocabularies, so a number may be two"
            " tokens. Tokenise both with one tokenizer, unless one only adds tokens to the other.",
            stacklevel=2,
        )


def _path_of(source: Any) -> Path | None:
    """The path of documents that are given as a path or as a mapping with a path."""
    if isinstance(source, Mapping):
        keys = (PATH, *(kind.key for kind in KINDS if kind.key is not None))
        source = next((source[key] for key in keys if key in source), None)
    return Path(source) if isinstance(source, str | Path) else None


KINDS: list[Kind] = [
    Kind("the name 'stdlib'", lambda s: isinstance(s, str) and s == "stdlib", _stdlib),
    Kind(
        "a Hugging Face datasets folder (save_to_disk, lightning-wlb tokenize) or .arrow files",
        _is_arrow,
        ArrowDocuments,
    ),
    Kind(".parquet files, or a folder of them", lambda s: _files(s, ".parquet"), ParquetDocuments),
    Kind(
        "Megatron's .bin with .idx, by their common path",
        lambda source: isinstance(source, Path) and has_index(source),
        MegatronDocuments,
    ),
    Kind(
        "a mapping {'texts': 'corpus.jsonl', 'tokenizer': ...} (JSON lines or text files)",
        None,
        _texts,
        key="texts",
    ),
    Kind("a mapping {'chats': 'chats.jsonl', 'tokenizer': ...}", None, _chats, key="chats"),
    Kind(
        "a mapping {'mixture': [{'documents': ..., 'weight': 0.7}, ...]}",
        None,
        _mixture,
        key="mixture",
    ),
    Kind("a list of sequences of token numbers", _is_sequences, InMemoryDocuments),
]
"""All ways to give documents; a source that fits two entries is refused."""


def documents(source: Any, **options: Any) -> DocumentStore:
    """Open documents, given in any of the known ways.

    Args:
        source: ``"stdlib"``; a path of a folder or file, or a pattern such as
            ``"corpus/*.parquet"``; a mapping ``{"path": ..., option: value, ...}``, or a mapping
            with another key of :data:`KINDS`; sequences of token numbers; or a store, which is
            returned as it is. docs/guide/documents.md lists all kinds.
        options: options of the kind of store, such as ``vocab_size``.

    Returns:
        A store whose lengths are known, and whose tokens are read on demand.

    Raises:
        ValueError: an unknown or missing source, an option that it does not have, or damaged files.
    """
    if isinstance(source, DocumentStore):
        if options:
            raise ValueError(
                f"documents: {source!r} is open already and takes no options; {options} were given."
                " Give them to the store's own constructor."
            )
        return source
    kind, source, options = _resolved("documents", source, options)
    taken = f"documents{_shown(source)} is taken for {kind.description}, which"
    check_names(taken, options, list(signature(kind.open).parameters)[1:])
    return kind.open(source, **options)


def check_documents(name: str, given: Any) -> None:
    """Raise ValueError for a source that :func:`documents` does not know, without opening it."""
    if not isinstance(given, DocumentStore):
        _resolved(name, given, {})


def documents_or_number(name: str, given: Any) -> int | Documents:
    """Check an argument that is documents or a number of documents to hold out; opens nothing.

    Raises:
        ValueError: documents that :func:`documents` does not know, or no whole number from 0 on.
    """
    if isinstance(given, DocumentStore | Sequence | Mapping | Path):
        check_documents(name, given)
        return given
    return whole(name, given, 0)


def _resolved(name: str, source: Any, options: dict[str, Any]) -> tuple[Kind, Any, dict[str, Any]]:
    """Find the kind of a source; returns the kind, the source as it opens it, and the options."""
    given = dict(source) if isinstance(source, Mapping) else {PATH: source}
    keyed = {kind.key: kind for kind in KINDS if kind.key is not None}
    named = [key for key in (PATH, *keyed) if key in given]
    if len(named) != 1:
        raise ValueError(
            f"{name}={given!r}: a mapping of documents has one of {', '.join((PATH, *keyed))}, and"
            " the options of what it names."
        )
    (key,) = named
    source = given.pop(key)
    if both := sorted(given.keys() & options.keys()):
        raise ValueError(f"{name}: {', '.join(both)} given twice. Give each option once.")
    if key == PATH:
        source = _with_paths(name, source)
        return _kind_of(name, source), source, {**given, **options}
    if key != "mixture" and not isinstance(source, str | Path):
        raise ValueError(f"{name}: {key}={source!r} is no path. Give that of the files.")
    return keyed[key], source, {**given, **options}


def _with_paths(name: str, source: Any) -> Any:
    """The source with strings turned into paths, and a glob pattern into the list of its files."""
    if isinstance(source, str) and glob.has_magic(source):
        plain = takewhile(lambda part: not glob.has_magic(part), Path(source).parts)
        if Path(source).exists():  # a file of that very name
            check_beside(Path(*plain), Path(source))
            return Path(source)
        found = _fitting(source)
        if not found:
            raise ValueError(f"{name}={source!r}: no file fits this pattern. Check the path.")
        check_beside(Path(*plain), *found)
        file_checks.check_no_copies(found)
        return found
    if isinstance(source, str) and source != "stdlib":
        return Path(source).expanduser()
    if isinstance(source, list | tuple) and all(isinstance(each, str | Path) for each in source):
        return [Path(each).expanduser() for each in source]
    return source


def _fitting(pattern: str) -> list[Path]:
    """The files and folders that fit a pattern, as ``glob.glob`` finds them with ``recursive``.

    ValueError where glob passes over an unreadable folder, or finds one in 2**40 ways, by links.
    """
    parts = [*Path(pattern).parts, *([""] if pattern.endswith("/") else [])]
    found: dict[Path, None] = {Path(): None}
    for place, part in enumerate(parts, 1):
        folders, found = [*filter(os.path.isdir, found)], {}
        seen: dict[str, str] = {}
        for folder in folders:
            if part != "**":
                file_checks.check_once(folder, seen)
                found.update(dict.fromkeys(_fitting_in(folder, part)))
            elif folder not in found:  # a folder above it was not walked through
                for at, names in folders_below(folder, seen):
                    files = [each for each in names if each[0] != "." and place == len(parts)]
                    found.update(dict.fromkeys(Path(at, each) for each in ("", *files)))
    return sorted(found.keys() - {Path()})


def _fitting_in(folder: Path, part: str) -> list[Path]:
    """The files and folders in a folder that fit one part of a pattern."""
    try:
        if not glob.has_magic(part):
            (folder / part).lstat()
            return [folder / part]
        with os.scandir(folder) as entries:
            names = fnmatch.filter((each.name for each in entries), part)
    except FileNotFoundError:
        return []
    except OSError as error:
        file_checks.refuse_closed(error)
    shown = [each for each in names if part[0] == "." or each[0] != "."]
    return [folder / each for each in shown if each != "lost+found"]


def _kind_of(name: str, source: Any) -> Kind:
    fitting = [kind for kind in KINDS if kind.fits is not None and kind.fits(source)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        both = ", or ".join(kind.description for kind in fitting)
        raise ValueError(
            f"{name}{_shown(source)} may be {both}. Give the files of one, as by 'folder/*.arrow'."
        )
    paths = source if isinstance(source, list) else [source]
    if missing := [path for path in paths if isinstance(path, Path) and not path.exists()]:
        raise ValueError(
            f"{name}{_shown(source)}: {missing[0]} is no file or folder. Give one, or 'stdlib'."
        )
    if isinstance(source, Path):
        file_checks.check_none_left_out(source, ".arrow", ".parquet")
    if _is_texts(source):
        raise ValueError(
            f"{name}{_shown(source)}: these are texts, which need a tokenizer. Tokenise them"
            " (lightning-wlb tokenize SOURCE OUT --tokenizer ...) and give OUT; or give {'texts':"
            f" {str(source)!r}, 'tokenizer': ...}}, 'chats' in place of 'texts' for chats."
        )
    raise ValueError(
        f"{name}{_shown(source)}: these are no documents that are known. Give a document store"
        " (lengths, vocab_size, read and mask: lightning_wlb.DocumentStore), or one of: "
        + "; ".join(kind.description for kind in KINDS)
        + "."
    )


def _shown(source: Any) -> str:
    if isinstance(source, Path | str):
        return f"={str(source)!r}"
    return f" of type {type(source).__name__}"


def hold_out(
    store: DocumentStore, count: int, seed: int, name: str
) -> tuple[DocumentStore, DocumentStore]:
    """Hold ``count`` documents out, chosen at random by the seed; ``name`` is the argument's name.

    Returns:
        The other documents, and the held-out documents, both in the order of ``store``.

    Raises:
        ValueError: no or all documents would be held out.
    """
    documents = len(store.lengths)
    if not 0 < count < documents:
        raise ValueError(
            f"{name}={count}: of {documents} documents, 0 to {documents - 1} can be held out."
        )
    # Python's own generator gives the same samples on every version.
    held_out = np.zeros(documents, bool)
    held_out[random.Random(seed).sample(range(documents), count)] = True
    kept, chosen = document_numbers(documents)[~held_out], np.flatnonzero(held_out)
    rest = store.subset(kept) if isinstance(store, MixedDocuments) else DocumentSubset(store, kept)
    return rest, DocumentSubset(store, chosen)
