"""Checks of a model's or tokenizer's folder that somebody else may have made.

A few bytes of a config can ask for any number of layers, and settings can name any file, even a
FIFO or a device. :func:`check_model` comes before transformers; JSON files are read once more.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_wlb.file_checks import check_regular, follow, is_open, read_json

_MODEL_TEXTS, _MODEL_TEXT_BYTES = {".json", ".jinja", ".txt", ".model"}, 1 << 28
MOST_LAYERS, MOST_PARTS = 2_000, 100_000
"""Most layers, heads or experts of a model."""
_COUNTS = re.compile(
    r".*num_(?!param).*|n_.*(layer|head|expert)s?|.*layers|first_k_dense_replace"
    r"|.*_(iter|iteration|cycle)s",
    re.DOTALL,  # else a newline at the end takes time with the square of the length
)
_SIZES = {"chunk_size": 1024, "mamba_chunk_size": 1024, "rotary_pct": 1, "partial_rotary_factor": 1}
"""Upper bounds of fields that set the size of a table, and that no weight's shape limits."""
_OF_LAYERS = re.compile("layer|pattern|attention_types|first_k_dense_replace|_iter|_cycle")
_LEADS_ELSEWHERE = {
    "attribute_map": "which gives fields the meaning of other fields",
    "backbone": "by which another config would be fetched",
    "transformers_weights": "by which other weights than the folder's would be meant",
}
_OPENED = {"vocab", "merges", "gguf_file", "vocab_file", "merges_file", "spm_file"}
"""Settings of a tokenizer that name a file anywhere if they are texts."""
_TOKENS = re.compile(r".*_tokens?")
SMALL_FILES = "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"
"""Patterns of what a model or tokenizer on the hub has beside weights."""


def check_counts(fields: Mapping[str, Any]) -> None:
    """Refuse a config with more layers, heads or experts, or larger tables, than can be built.

    A few bytes can ask for any number, and some families build lists of that length as soon as
    transformers reads the config, also for a tokenizer. A config may not map one field to another
    either, or name another config, which would be fetched and read unchecked.
    """
    for name, why in _LEADS_ELSEWHERE.items():
        if name in fields and fields[name] is not None:
            raise ValueError(f"The config has {name}={fields[name]!r:.80}, {why}: take it out.")
    for name, value in fields.items():
        if len(str(name)) > 1000 or len(re.findall(r"\d", str(name))) > 15:  # may have one hash
            raise ValueError(f"The config has a field named {name!r:.80}: take it out.")
        if isinstance(value, Mapping):
            check_counts(value)
        most = _SIZES.get(str(name), 0)
        numbers = value if isinstance(value, list | tuple) else [value]
        if most and any(isinstance(each, int | float) and not each <= most for each in numbers):
            raise ValueError(f"The config has {name}={value!r:.80}, of which {most} is the most.")
        most = MOST_LAYERS if _OF_LAYERS.search(str(name)) else MOST_PARTS
        counts = [max(each, 0) for each in _counts(str(name), value)]
        for count, bound in ((max(counts, default=0), most), (sum(counts), MOST_PARTS)):
            if count > bound:
                raise ValueError(
                    f"The config has {name}={count:,}: building more than {bound:,} would take"
                    " minutes, or all memory. Mend it, or use another."
                )


def _counts(name: str, value: Any) -> Iterator[int]:
    """The numbers of parts that a field asks for; in a list in a list all whole numbers count."""
    if type(value) is int and _COUNTS.fullmatch(name):
        yield value
    elif isinstance(value, str) and name.endswith("pattern"):
        yield len(value)  # a letter for each layer
    elif isinstance(value, list | tuple):
        if re.search("layer|block|_ids|indices|attention_types", name):  # an entry for each layer
            yield len(value)
        for each in value:
            yield from _counts(f"num_{name}" if isinstance(each, list | tuple) else name, each)


def is_here(name: str | Path) -> bool:
    """Whether a name means a folder or file here, and not a model or tokenizer on the hub.

    Raises ValueError if another user may have put that there in place of what is on the hub.
    """
    may_be_hubs = isinstance(name, str) and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)
    found = follow(name)[1] if may_be_hubs else ()
    # The working folder itself may be a colleague's.
    if strange := [at for at in found if not Path.cwd().is_relative_to(at)]:
        raise ValueError(
            f"{name} may mean a name on the hub, but another user has put {strange[0]} here. Write"
            f" ./{name} if you trust that, or change to a folder of your own."
        )
    return Path(name).exists()


@cache
def hub_is_out_of_reach() -> bool:
    """Whether the hub's name cannot be resolved; its library would need half a minute to see it."""
    from urllib.request import getproxies

    if getproxies():
        return False  # a proxy may resolve the name
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return True
    return False


def hub_copy(name: str, wanted: Sequence[str] = SMALL_FILES, fetch: bool = True) -> Path:
    """The folder in the hub's cache with the ``wanted`` files of what the hub has.

    transformers is given that folder in place of the name, since it would read a folder of that
    name that comes into the working folder meanwhile.

    Args:
        name: a model's or tokenizer's name on the hub.
        wanted: patterns of the files' names.
        fetch: whether to download what is missing; not if a checkpoint names it.

    Raises:
        ValueError: the hub, or its cache if nothing is fetched, does not have it.
    """
    from huggingface_hub import snapshot_download

    closed = "there is no network" if hub_is_out_of_reach() else ""
    if not fetch:
        closed = (
            "nothing is fetched while a checkpoint is loaded, which may name anything (call"
            f" huggingface_hub.snapshot_download({name!r}) if you trust it)"
        )
    try:
        fetched = snapshot_download(
            name,
            allow_patterns=[*wanted],
            ignore_patterns=["original/*", "metal/*", "onnx/*", "consolidated*", "LICENSE*"],
            local_files_only=bool(closed),
        )
        return Path(fetched)
    except Exception as error:  # many kinds: no such name, no permission
        why = f"the hub does not give it: {error}"
        if kept := getattr(error, "snapshot_path", None):
            # A download that broke off leaves out an end token, or a newer template.
            part = f"the hub's cache has only a part: fetch the rest, or name that part, {kept}"
            why = f"{part} ({closed}: {error})" if closed else f"{part} ({error})"
        elif closed and isinstance(error, OSError):
            why = f"the hub's cache on this machine does not have it: {closed}"
        raise ValueError(f"There is no folder {name!r} here, and {why}") from error


def check_beside(trusted: Path, *paths: Path) -> None:
    """Refuse a path if a stranger has put it, or a link that leads to it, into a trusted folder.

    Trusted are ``trusted`` (of a file, its folder) and the folders from there to each path. The
    owners of these, of the file, and of folders that lead there may have put files there or below.
    """
    home, folders = trusted if trusted.is_dir() else trusted.parent, {}
    for path in paths:
        found, owners = follow(path)[1].items(), set[int]()
        between = len(path.parts) - 1 - len(home.parts) if home in path.parents else 0
        for folder in (home, *reversed(path.parents[:between])):
            if folder not in folders:
                real, made = follow(folder)
                named = (folder, trusted) if folder == home else (folder,)
                known = [*made.values(), *(each.stat() for each in named if each.exists())]
                folders[folder] = real, owners | {each.st_uid for each in known}
            real, owners = folders[folder]
            start = os.path.join(real, "")  # not by at.parents, which is made anew each time
            below = [(at, each) for at, each in found if str(at).startswith(start)]
            # ``found`` has all steps behind a stranger's folder, even where only its owner writes.
            if any(each.st_uid not in owners and is_open(at.parent.stat()) for at, each in below):
                raise ValueError(
                    f"{path} is another user's, where others may put files. Remove it, or take a"
                    " folder of your own, with links to files that you trust."
                )


def check_model(path: str | Path) -> None:
    """Check a model's or tokenizer's folder, or one of its files.

    Each file must pass :func:`.check_regular`, and the config :func:`check_counts`. Config and
    tokenizer settings may not name files elsewhere, which transformers would open instead.
    """
    path = Path(path)
    templates = path / "additional_chat_templates"
    files = [*path.iterdir(), *templates.glob("*")] if path.is_dir() else [path]
    files = sorted(each for each in files if not each.is_dir())
    check_beside(path, *files)
    for each in files:
        check_regular(each, _MODEL_TEXT_BYTES if each.suffix in _MODEL_TEXTS else None)
    config = path / "config.json" if path.is_dir() else path
    if config.name == "config.json" and config.exists():
        fields = read_json(config)
        fields = fields if isinstance(fields, Mapping) else {}
        if "configuration_files" in fields:
            raise ValueError(
                f"{config} names other files (configuration_files) that are read in its place. Put"
                " the one that you mean there."
            )
        check_counts(fields)
    for name in ("tokenizer_config.json", "special_tokens_map.json") if path.is_dir() else ():
        if (path / name).exists():
            _check_settings(path / name)


def _check_settings(path: Path) -> None:
    """Refuse settings that name files or ask for code, and special tokens that are none."""
    fields = read_json(path)
    for name, value in fields.items() if isinstance(fields, Mapping) else ():
        opens = isinstance(value, str) and name in _OPENED
        opens |= name == "fast_tokenizer_files" and re.search(r"[/\\]", str(value)) is not None
        opens |= name in ("init_inputs", "trust_remote_code") and bool(value)
        # A special tokens map overrides other settings, even those that were checked before.
        if opens or (path.name == "special_tokens_map.json" and not _TOKENS.fullmatch(name)):
            raise ValueError(
                f"{path} has {name}={value!r:.80}, which may open files elsewhere: take it out."
            )
