"""A pretrained folder: which stored tensors make up a parameter, and rectangles of them.

safetensors maps a file into memory, so that reading a rectangle costs the pages on which it lies:
for rows of a matrix only these rows, for columns up to the whole matrix.

Many folders are older than transformers' present modules: names differ, and a mixture's experts are
stored one by one while the module has them in one parameter. transformers has the conversions
(``conversion_mapping``). Renaming, stacking and joining become :class:`Tiles`, so that a rectangle
of the parameter costs only its parts in the stored tensors. Families whose folders need any other
conversion are refused; no checked family does.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from lightning_wlb.file_checks import read_json
from lightning_wlb.model_folder_checks import SMALL_FILES, check_model, hub_copy, is_here

Box = tuple[slice, ...]
"""A rectangle of a tensor: for each dim the first index and the end."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_ADAPTERS = "adapter_config.json"
# transformers' expressions for names take time with the square of their length.
_LONGEST_NAME = 1000


def resolve(name_or_folder: str | Path, fetch: bool = True) -> Path:
    """The folder of a model: the given folder, or a copy of the model of that name on the hub.

    The download (safetensors, configs and tokenizer into Hugging Face's own cache) has only been
    tested with a stand-in for the hub. Without ``fetch`` nothing is downloaded and only an existing
    copy is used, since the name may come from an untrusted checkpoint.

    Raises:
        ValueError: there is no such folder here, and the hub does not give one.
    """
    folder = Path(name_or_folder)
    if is_here(name_or_folder) and folder.is_dir():
        return folder
    return hub_copy(str(name_or_folder), (*SMALL_FILES, "*.safetensors"), fetch)


def beside_weights(config: str | Path) -> bool:
    """Whether a config has weights beside it: in its folder here, or under its name on the hub."""
    folder = Path(config).parent if Path(config).is_file() else Path(config)
    return not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


class Folder:
    """Tensors by name, in one file or in several with an index, as ``save_pretrained`` writes them.

    As in transformers, the single file is read if there are both (saving one file over several
    leaves their index). Only the names of files are read from an index: the files say which tensors
    they hold. If a model also takes images or sound, only its language model's tensors are
    included, with the names that they have in a folder of the language model alone.

    Attributes:
        path: the folder.
        names: the names of all tensors.

    Raises:
        ValueError: there are no safetensors, there are adapters beside them, a file cannot be read,
            or two tensors have the same name, also as the language model's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, Any] = {}
        check_model(path)
        if (path / _ADAPTERS).exists():
            raise ValueError(
                f"{path} has adapters beside weights ({_ADAPTERS}), which transformers would add to"
                " them, and which are not read here. Merge them (peft's merge_and_unload), and save"
                " the model into another folder; or, to train without them, move them away."
            )
        if (path / _SINGLE).is_file():
            files = [_SINGLE]
        elif (path / _INDEX).is_file():
            files = _files_of(path / _INDEX)
        else:
            others = sorted(each.name for each in path.glob("*.bin"))
            found = f"only {', '.join(others)}" if others else "neither"
            raise ValueError(
                f"{path} should hold {_SINGLE} or {_INDEX}, but has {found}. Write safetensors"
                " from a model that transformers can open:"
                " AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)."
            )
        config = path / "config.json"
        has_more = config.is_file() and "text_config" in read_json(config)
        name_of = _name_alone if has_more else str
        self._stored: dict[str, tuple[str, str]] = {}  # name there, and file
        for place in ((key, one) for one in files for key in self._file(one).keys()):  # noqa: SIM118
            if len(place[0]) > _LONGEST_NAME or not place[0].isascii():
                raise ValueError(
                    f"{path / place[1]} has a tensor named {place[0][:50]!a}, not in ASCII or of"
                    f" more than {_LONGEST_NAME:,} characters. Save the model again."
                )
            name = name_of(place[0])
            if name and (first := self._stored.setdefault(name, place)) != place:
                raise _unclear(path, name, [" of ".join(each) for each in (first, place)])
        self.names = frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """A whole tensor's shape, without reading it."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """A tensor's dtype, as safetensors names it: ``"BF16"``, ``"I8"``."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, box: Box = ()) -> Tensor:
        """A rectangle of a tensor on the CPU, in the file's dtype; the whole tensor by default."""
        return self._slice(name)[box]

    def _slice(self, name: str) -> Any:
        stored, file = self._stored[name]
        return self._file(file).get_slice(stored)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.path / name, "pt").__enter__()
            except (OSError, UnicodeError, SafetensorError) as error:
                raise ValueError(f"{self.path / name} cannot be read: {error}") from error
        return self._open[name]


def _files_of(index: Path) -> list[str]:
    """The files that are named by the index of a folder with several files."""
    try:
        named = list[str](read_json(index)["weight_map"].values())
        if outside := [name for name in named if os.path.basename(name) != name]:
            raise ValueError(f"{outside[0]!r} is not in the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is no index of safetensors, which is JSON with a weight_map"
            f" ({type(error).__name__}: {error}). Copy or download the folder again."
        ) from error
    return sorted(set(named))


def _name_alone(stored: str) -> str:
    """A tensor's name in the language model alone; empty if it belongs to another part."""
    if stored.startswith("lm_head."):
        return stored
    for within, alone in (("language_model.", ""), ("model.language_model.", "model.")):
        if stored.startswith(within):
            return alone + stored.removeprefix(within)
    return ""


class Tiles:
    """A parameter that is made of stored tensors side by side.

    Args:
        folder: the folder that holds the tensors.
        corners: the name of each stored tensor -> its first corner in the parameter.
        lead: the number of dims of size 1 that are put before each stored tensor's dims.

    Attributes:
        boxes: the name of each stored tensor -> the part of the parameter that it fills.
        shape: the shape of the parameter.

    Raises:
        ValueError: the tensors do not fill the parameter.
    """

    def __init__(self, folder: Folder, corners: Mapping[str, Sequence[int]], lead: int) -> None:
        self._folder, self._lead = folder, lead
        self.boxes: dict[str, Box] = {
            key: tuple(
                slice(first, first + size)
                for first, size in zip(corner, (1,) * lead + folder.shape(key), strict=True)
            )
            for key, corner in corners.items()
        }
        ends = ([each.stop for each in box] for box in self.boxes.values())
        self.shape = tuple(map(max, zip(*ends, strict=True)))
        if math.prod(self.shape) != sum(math.prod(folder.shape(key)) for key in corners):
            raise ValueError(
                f"{folder.path}: {', '.join(list(corners)[:3])} together do not fill a tensor of"
                f" shape {self.shape}. Copy or download the folder again."
            )

    def copy_to(self, target: Tensor, box: Box) -> None:
        """Write the values of a rectangle of the parameter into a tensor of its size."""
        for key, tile in self.boxes.items():
            common = _intersection(tile, box)
            if common is not None:
                stored = _within(common, tile)[self._lead :]
                target[_within(common, box)].copy_(self._folder.read(key, stored))


def digest_of(sources: Mapping[str, Tiles]) -> str:
    """Sixteen hexadecimal digits for the names, shapes and values of a model's weights.

    256 values are read at the beginning, in the middle and at the end of each tensor. So weights of
    another training, seed or version have another digest, and equal weights have the same digest in
    any files and any dtype that holds them. A change of other values, as in a few rows, is missed.
    """
    digest = hashlib.sha256()
    for name, tiles in sorted(sources.items()):
        digest.update(f"{name}{tiles.shape}".encode())
        most = [1] * (len(tiles.shape) - 1) + [256]
        for place in range(3):
            box = tuple(
                slice(first := max(0, size - n) * place // 2, min(first + n, size))
                for size, n in zip(tiles.shape, most, strict=False)
            )
            sizes = [each.stop - each.start for each in box]
            values = torch.empty(sizes, dtype=torch.float64, device="cpu")
            tiles.copy_to(values, box)
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def find_sources(folder: Folder, model: nn.Module) -> dict[str, Tiles]:
    """The stored tensors of each parameter and buffer of a family's model, by name.

    The folder may be of any version of transformers. Names without stored tensors are left out.
    Tensors that the model, a ``ForCausalLM``, does not have are included under their own names.

    Raises:
        ValueError: folders that need another conversion, or two tensors for one place in the model.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(folder.names, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state:
            # The tensor has the model's name already, which a renaming would change.
            as_it_is, _ = rename_source_key(key, [], [], prefix, state)
            name, pattern = (as_it_is, None) if as_it_is in state else (name, pattern)
        found[name][pattern].append(key)
    sources: dict[str, Tiles] = {}
    for name, by_part in found.items():
        first, *others = (key for keys in by_part.values() for key in keys)
        if None not in by_part:
            sources[name] = _tiles(folder, name, by_pattern[next(iter(by_part))], by_part)
        elif others and name in state:
            raise _unclear(folder.path, name, [first, *others])
        else:
            sources[name] = Tiles(folder, {first: (0,) * len(folder.shape(first))}, 0)
    return sources


def _unclear(path: Path, name: str, stored: Sequence[str]) -> ValueError:
    return ValueError(
        f"{path} holds {', '.join(stored[:3])} as {name}. A parameter has one name in one file, and"
        " experts are numbered from 0: one would hide another. Download or copy the folder again."
    )


def _tiles(
    folder: Folder, name: str, converter: WeightConverter, keys: Mapping[Any, list[str]]
) -> Tiles:
    """A parameter of tensors stacked along a new first dim, joined along another, or both."""
    operations = list(converter.operations)
    stacks = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
    joins = operations[1:] if stacks else operations
    plain = len(joins) <= 1 and all(isinstance(each, Concatenate) for each in joins)
    if not plain or (not joins and len(keys) > 1):
        made = ", ".join(type(each).__name__ for each in operations)
        raise ValueError(
            f"{folder.path}: transformers makes this family's parameters of stored tensors by"
            f" {made}, so no rank can read its part. Choose another family (docs/families.md)."
        )
    corners, offset = {}, 0
    for pattern in (each for each in converter.source_patterns if each in keys):
        numbers = tuple(map(str, range(len(keys[pattern]))))
        parts = zip(*(key.split(".") for key in keys[pattern]), strict=False)
        if numbers not in parts if stacks else len(numbers) > 1:
            raise _unclear(folder.path, name, keys[pattern])
        if len(shapes := {folder.shape(key) for key in keys[pattern]}) > 1:
            raise ValueError(
                f"{folder.path}: {', '.join(keys[pattern][:3])} are of several shapes,"
                f" {sorted(shapes)[:3]}. Copy or download the folder again."
            )
        for number, key in enumerate(keys[pattern]):
            shape = (1, *folder.shape(key)) if stacks else folder.shape(key)
            corner = [0] * len(shape)
            if stacks:
                corner[0] = number
            if joins:
                corner[joins[0].dim] = offset
                if not stacks:
                    offset += shape[joins[0].dim]
            corners[key] = corner
        if stacks and joins:
            offset += shape[joins[0].dim]
    return Tiles(folder, corners, int(stacks))


def _intersection(one: Box, other: Box) -> Box | None:
    """The intersection of two rectangles; None if it is empty."""
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return common if all(each.start < each.stop for each in common) else None


def _within(inner: Box, outer: Box) -> Box:
    """``inner``, counted from the first corner of ``outer``, which contains it."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True)
    )
