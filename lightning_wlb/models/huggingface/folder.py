"""A folder of safetensors, of which single rectangles of single tensors are read.

safetensors maps a file into memory, so that a rectangle costs the pages that it lies on: rows of a
matrix no more than themselves, columns of it up to the whole matrix where rows are shorter than a
page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

Box = tuple[slice, ...]
"""A rectangle of a tensor: of each dim the first index and the one behind the last."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# What a model's folder on the hub has beside weights in other formats.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]


class Folder:
    """Tensors by name, in one file or in several with an index.

    Args:
        path: as ``save_pretrained`` writes it.

    Attributes:
        path: as given.
        names: of all tensors.

    Raises:
        ValueError: if there are no safetensors, or a file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, Any] = {}
        if (path / _INDEX).is_file():
            self._files: dict[str, str] = _weight_map(path / _INDEX)
        elif (path / _SINGLE).is_file():
            self._files = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        else:
            others = sorted(each.name for each in path.glob("*.bin"))
            found = f"only {', '.join(others)}" if others else "neither"
            raise ValueError(
                f"{path} should hold {_SINGLE} or {_INDEX}, but has {found}. Write safetensors"
                " from a model that transformers can open:"
                " AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)."
            )
        self.names = frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, whole; nothing is read."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Of a tensor, as safetensors names it: ``"BF16"``, ``"I8"``."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A rectangle of a tensor on the CPU, in the file's dtype; the whole tensor if None."""
        if box is None:
            whole: Tensor = self._file(self._files[name]).get_tensor(name)
            return whole
        part: Tensor = self._slice(name)[box]
        return part

    def _slice(self, name: str) -> Any:
        try:
            return self._file(self._files[name]).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{self.path / self._files[name]}: {error}") from error

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.path / name, "pt").__enter__()
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{self.path / name} cannot be read: {error}") from error
        return self._open[name]


class TextPart(Folder):
    """The language model in a folder of a model that takes images or sound too.

    Its tensors go by the names that they have in a folder of the language model alone.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._stored = {alone: name for name in self._files if (alone := _alone(name))}
        self.names = frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, whole; nothing is read."""
        return super().shape(self._stored[name])

    def dtype(self, name: str) -> str:
        """Of a tensor, as safetensors names it."""
        return super().dtype(self._stored[name])

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A rectangle of a tensor on the CPU, in the file's dtype; the whole tensor if None."""
        return super().read(self._stored[name], box)


def _weight_map(index: Path) -> dict[str, str]:
    """File of each tensor, from the index of a folder with several files."""
    try:
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index} is no index of safetensors, which is JSON with a weight_map"
            f" ({type(error).__name__}: {error}). Copy or download the folder again."
        ) from error
    return files


def _alone(name: str) -> str | None:
    """The name of a language model's tensor by itself; None for what belongs to other parts."""
    if name.startswith("lm_head."):
        return name
    for within, alone in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(within):
            return alone + name.removeprefix(within)
    return None


def open_folder(path: Path) -> Folder:
    """A model's folder, or the language model in it where its config says that there is more."""
    config = path / "config.json"
    has_more = config.is_file() and "text_config" in json.loads(config.read_text())
    return TextPart(path) if has_more else Folder(path)


def resolve(name_or_folder: str | Path) -> Path:
    """The folder of a model: the one given, or a copy of the one of that name on the hub.

    The download (safetensors, configs and tokenizer into Hugging Face's own cache) has only been
    called with a stand-in for the hub, never run against it.

    Raises:
        ValueError: it is no folder here, and cannot be had from the hub.
    """
    folder = Path(name_or_folder)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name_or_folder), allow_patterns=_WANTED))
    except Exception as error:  # of many kinds: no network, no such name, no permission
        raise ValueError(
            f"{str(name_or_folder)!r} is not a folder on this machine, and fetching a model of that"
            f" name from Hugging Face failed: {error}"
        ) from error
