"""Weights of a decoder as a folder that ``from_pretrained`` opens.

Names and layout are the family's original ones, by transformers' own conversion
(``revert_weight_conversion``), as ``save_pretrained`` writes them. The model is never whole in
memory: a layer at a time is read, converted and added to a file, which is written when it is full.

Cost: memory for one layer and one file of weights. A layer of a large mixture is the most of it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.lora import is_adapter, write_adapters
from lightning_wlb.models.huggingface.weights import skeleton

Read = Callable[[Iterable[str]], Mapping[str, Tensor]]
Report = Callable[[int, int], None]
FILE_BYTES = 5 * 10**9
"""Most bytes of a file of weights, unless a single tensor has more."""

GENERATION = "generation_config.json"
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)


def write_model(
    read: Read,
    config: Any,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    report: Report = lambda done, of: None,
) -> int:
    """Write weights, config and generation config.

    Args:
        read: gives tensors by the decoder's names, whole, in the shapes in which it holds them.
        config: the decoder's transformers config.
        folder: exists, and is filled.
        dtype: of the parameters; the config's if None, and where it has none as they are read.
            Buffers, and what the family always keeps in float32, are written as they are read.
        report: called with the number of groups of tensors that are written, and of all.

    Returns:
        The number of tensors in the folder.
    """
    config = copy.deepcopy(config)
    model = skeleton(config)
    decoder = _outline(config)
    dtype = dtype or _dtype(config)
    kept = tuple(model._keep_in_fp32_modules_strict or ())
    buffers = {name for name, _ in decoder.persistent_buffers()}
    files = _Files(folder)
    groups = list(_groups(decoder))
    for number, names in enumerate(groups):
        state = {}
        for name, value in read(names).items():
            own = decoder.family_name(name)
            if name not in buffers:
                value = value.view(decoder.family_shape(name))
                wide = any(each in own.split(".") for each in kept)
                value = value.to(value.dtype if wide or dtype is None else dtype)
            state[own] = value
        for own, value in revert_weight_conversion(model, state).items():
            files.add(own, value)
        report(number + 1, len(groups))
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(folder)
    with suppress(ValueError):  # settings for generation that contradict each other
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    return files.finish()


def write_adapted(
    read: Read,
    config: Any,
    lora: Mapping[str, Any],
    base: str,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
) -> int:
    """Write the adapters of a model that was trained with LoRA, as peft reads them.

    Args:
        read: as in :func:`write_model`.
        config: the decoder's transformers config.
        lora: fields of ``LoraConfig``.
        base: folder or name of the weights that the adapters belong to.
        folder: exists, and is filled.
        dtype: of the adapters; as they are read if None.

    Returns:
        The number of tensors in the folder.
    """
    decoder = _outline(config, lora)
    names = [name for name, _ in decoder.named_parameters() if is_adapter(name)]
    adapters = {
        decoder.family_name(name): value.view(decoder.family_shape(name)).to(dtype or value.dtype)
        for name, value in read(names).items()
    }
    return write_adapters(adapters, lora, base, folder)


def _outline(config: Any, lora: Mapping[str, Any] | None = None) -> HuggingFaceDecoder:
    """A decoder without memory, for its names and shapes."""
    with torch.device("meta"):
        return HuggingFaceDecoder(config, lora=lora)


def files_beside(source: Path) -> list[str]:
    """Names of the tokenizer's files, and of the generation config, in a model's folder."""
    names = {each.name for pattern in _TOKENIZER for each in source.glob(pattern)}
    return sorted(name for name in {*names, GENERATION} if (source / name).is_file())


def _groups(decoder: HuggingFaceDecoder) -> Iterator[list[str]]:
    """Names of what is read together: each layer, and each end. A tied head is not written."""
    groups: dict[str, list[str]] = {}
    for name, _ in [*decoder.named_parameters(), *decoder.persistent_buffers()]:
        part, number, *_ = name.split(".")
        groups.setdefault(number if part == "layers" else part, []).append(name)
    yield from groups.values()


def _dtype(config: Any) -> torch.dtype | None:
    dtype = config.dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


class _Files:
    """Tensors in files of at most FILE_BYTES; their names say how many files there are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._of: dict[str, int] = {}
        self._files = 0
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if _bytes(self._waiting.values()) + tensor.nbytes > FILE_BYTES:
            self._flush()
        # What a conversion cuts from one tensor shares its memory, which a file would hold whole.
        shares = tensor.untyped_storage().nbytes() != tensor.nbytes
        self._waiting[name] = tensor.clone() if shares else tensor.contiguous()
        self._of[name] = self._files
        self._total += tensor.nbytes

    def finish(self) -> int:
        """Write the rest and the index; returns the number of tensors."""
        self._flush()
        if self._files == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return len(self._of)
        names = [
            f"model-{number + 1:05d}-of-{self._files:05d}.safetensors"
            for number in range(self._files)
        ]
        for number, name in enumerate(names):
            self._part(number).rename(self._folder / name)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {name: names[number] for name, number in sorted(self._of.items())},
        }
        text = json.dumps(index, indent=2) + "\n"
        (self._folder / "model.safetensors.index.json").write_text(text)
        return len(self._of)

    def _flush(self) -> None:
        if self._waiting:
            save_file(self._waiting, self._part(self._files), metadata={"format": "pt"})
            self._files += 1
            self._waiting = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}"


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
