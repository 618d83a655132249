"""Reads pretrained weights into a decoder, and exports its weights for ``from_pretrained``.

**Loading.** The decoder is whole, or one rank's share on any mesh. The rank reads the rectangle
that it holds of each parameter directly into the parameter, so that besides its share it needs
memory for one rectangle of one tensor. Before any value is made, the folder's names and shapes are
compared with the model that the config describes: missing or extra tensors and other shapes are
refused, on every rank alike. For this, every rank reads the headers of all files.

**Export.** Names and layout are the family's original ones, by transformers' own conversion
(``revert_weight_conversion``), as ``save_pretrained`` writes them. The model is never whole in
memory: a layer at a time is read, converted and added to a file, which is written when it is full.
Cost: memory for one layer and one file of weights.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from lightning_wlb.checkpoints.sharded import in_words
from lightning_wlb.models.decoder import without_values
from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.lora import is_adapter, peft_config
from lightning_wlb.models.huggingface.model_parts import blank_model
from lightning_wlb.models.huggingface.safetensors_folder import Box, Folder, Tiles, find_sources
from lightning_wlb.models.tensor_parallel import held, share_of

# Dtypes of weights. A weight stored in another dtype is quantised: codes, with a separate scale.
_PLAIN = {"F64", "F32", "F16", "BF16"}
# Tables that old versions of transformers stored; now modules compute them.
_COMPUTED = r"rotary_emb\.inv_freq"


def open_weights(config: Any, folder: str | Path) -> dict[str, Tiles]:
    """The stored tensors of each parameter and buffer of a config's model, by the family's names.

    Args:
        folder: a folder with a model of the same config, as ``save_pretrained`` writes it.

    Raises:
        ValueError: the folder has no safetensors, or its tensors do not fit the model.
    """
    files, model = Folder(Path(folder)), blank_model(config)
    sources = find_sources(files, model)
    _check(files, sources, model)
    return {name: each for name, each in sources.items() if name in model.state_dict()}


def load(decoder: HuggingFaceDecoder, sources: Mapping[str, Tiles]) -> None:
    """Fill the parameters and persistent buffers that this rank holds, but no adapters.

    Args:
        decoder: its parameters have memory, on any device and in any dtype; DTensors or not.
        sources: the result of :func:`open_weights` for the same config.

    Raises:
        ValueError: the config ties embedding and head, but the folder has different values.
    """
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if is_adapter(name):
                continue
            # A tied parameter may be stored under the names of embedding and head.
            first = decoder.tied.get(name, name)
            names = [first, *(head for head, embed in decoder.tied.items() if embed == first)]
            found = [sources[each] for each in map(decoder.family_name, names) if each in sources]
            family = decoder.family_shape(name)
            for part, box in _family_boxes(parameter.shape, family, share_of(parameter)):
                target = held(parameter)[part]
                found[0].copy_to(target, box)
                for double in found[1:]:
                    other = torch.empty_like(target)
                    double.copy_to(other, box)
                    if not torch.equal(target, other):
                        raise ValueError(
                            f"the config ties {decoder.family_name(name)} to the model's other end,"
                            " but the folder stores other values there. Set"
                            " tie_word_embeddings=False in the config."
                        )
        for name, buffer in decoder.persistent_buffers():
            whole = tuple(slice(0, size) for size in buffer.shape)
            sources[decoder.family_name(name)].copy_to(buffer, whole)


def _family_boxes(
    shape: Iterable[int], family: Iterable[int], box: Box
) -> Iterator[tuple[tuple[slice | int, ...], Box]]:
    """The rectangles of the family's shape that make up a rectangle of the held shape.

    A packed parameter is held with two dims in place of one dim of the family's shape; each index
    of the first dim is a separate rectangle.

    Yields:
        The place of the rectangle in the tensor that the rank holds, and the rectangle itself.
    """
    held_shape, family_shape = tuple(shape), tuple(family)
    if any(each.start == each.stop for each in box):
        return
    if held_shape == family_shape:
        yield (...,), box  # type: ignore[misc]
        return
    dim = next(i for i, size in enumerate(family_shape) if held_shape[i] != size)
    width = held_shape[dim + 1]
    for index, i in enumerate(range(box[dim].start, box[dim].stop)):
        columns = slice(i * width + box[dim + 1].start, i * width + box[dim + 1].stop)
        whole = (slice(None),) * dim
        yield (*whole, index), (*box[:dim], columns, *box[dim + 2 :])


def _check(folder: Folder, sources: Mapping[str, Tiles], model: Any) -> None:
    """Raise ValueError for tensors that are missing, too many, quantised or of another shape."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    codes = [
        f"{key} is {dtype}"
        for name, tensor in state.items()
        if name in sources and tensor.is_floating_point()
        for key in sources[name].boxes
        if (dtype := folder.dtype(key)) not in _PLAIN
    ]
    if codes:
        raise ValueError(
            f"{folder.path} is quantised: {', '.join(codes[:3])}. Training needs the weights"
            " themselves: give a folder in bfloat16, float16 or float32."
        )
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    missing = [each[0] for each in names.values() if not any(name in sources for name in each)]
    ignored = [_COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]
    unknown = [
        name
        for name in sources
        if name not in state and not any(re.search(pattern, name) for pattern in ignored)
    ]
    shapes = [
        f"{name} is {sources[name].shape}, in the model {tuple(state[name].shape)}"
        for name in state
        if name in sources and sources[name].shape != tuple(state[name].shape)
    ]
    found = {"missing": missing, "not in the model": unknown, "of another shape": shapes}
    if said := in_words(found):
        raise ValueError(
            f"{folder.path} does not hold the weights of {type(model).__name__} of this config;"
            f" {said}. Give the folder's own config, or the folder that belongs to this config."
        )


Read = Callable[[Iterable[str]], Mapping[str, Tensor]]
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
    report: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Write weights, config and generation config.

    Args:
        read: gives whole tensors by the decoder's names, in the shapes in which it holds them.
        config: the decoder's transformers config.
        folder: an existing folder, into which the files are written.
        dtype: dtype of the parameters; None: the config's, or if it has none as they are read.
            Buffers, and parameters that the family always keeps in float32, are not cast.
        report: called with the number of written groups of tensors, and the number of all groups.

    Returns:
        The number of tensors in the folder.
    """
    config = copy.deepcopy(config)
    model = blank_model(config)
    decoder = _blank_decoder(config)
    dtype = dtype or (
        getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    )
    kept = tuple(model._keep_in_fp32_modules_strict or ())
    buffers = {name for name, _ in decoder.persistent_buffers()}
    files = _Files(folder)
    groups = list(_groups(decoder))
    for number, names in enumerate(groups):
        state = {}
        for name, value in read(names).items():
            own = decoder.family_name(name)
            if name not in buffers:
                value = _as_family(decoder, name, value)
                wide = any(each in own.split(".") for each in kept)
                value = value.to(value.dtype if wide or dtype is None else dtype)
            state[own] = value
        for own, value in revert_weight_conversion(model, state).items():
            files.add(own, value)
        report(number + 1, len(groups))
    for name in ("auto_map", "custom_pipelines", "custom_generate"):  # of where training began
        vars(config).pop(name, None)  # they name code, which would be passed on
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
    """Write the adapters of a LoRA run as ``PeftModel.from_pretrained`` reads them.

    ``lora`` has fields of ``LoraConfig``, and ``base`` is the folder or name of the weights under
    the adapters. The rest is as in :func:`write_model`; without a ``dtype`` adapters are not cast.
    """
    decoder = _blank_decoder(config, lora)
    names = [name for name, _ in decoder.named_parameters() if is_adapter(name)]
    state = {}
    for name, value in read(names).items():
        own = f"base_model.model.{decoder.family_name(name).replace('.default.', '.')}"
        state[own] = _as_family(decoder, name, value).to(dtype or value.dtype).contiguous()
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config(lora, base_model_name_or_path=base, inference_mode=True).save_pretrained(folder)
    return len(state)


def _blank_decoder(config: Any, lora: Mapping[str, Any] | None = None) -> HuggingFaceDecoder:
    with without_values():
        return HuggingFaceDecoder(config, lora=lora)


def _as_family(decoder: HuggingFaceDecoder, name: str, value: Tensor) -> Tensor:
    """A parameter's values in the family's shape; ValueError if their number differs."""
    shape = decoder.family_shape(name)
    if value.numel() != math.prod(shape):
        raise ValueError(
            f"The checkpoint's {name} is {tuple(value.shape)}, and by its hyperparameters"
            f" {decoder.family_name(name)} should be {shape}. Use another checkpoint."
        )
    return value.view(shape)


def files_beside(source: Path) -> list[str]:
    """Names of the tokenizer's files and of the generation config in a model's folder."""
    names = {each.name for pattern in _TOKENIZER for each in source.glob(pattern)}
    return sorted(name for name in {*names, GENERATION} if (source / name).is_file())


def _groups(decoder: HuggingFaceDecoder) -> Iterator[list[str]]:
    """Groups of names that are read together: each layer, embedding, head unless it is tied."""
    groups: dict[str, list[str]] = {}
    for name, _ in [*decoder.named_parameters(), *decoder.persistent_buffers()]:
        part, number, *_ = name.split(".")
        groups.setdefault(number if part == "layers" else part, []).append(name)
    yield from groups.values()


class _Files:
    """Writes tensors to files of at most FILE_BYTES, whose names say how many files there are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._of: dict[str, int] = {}
        self._files = 0
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if sum(each.nbytes for each in self._waiting.values()) + tensor.nbytes > FILE_BYTES:
            self._flush()
        # Parts that a conversion cuts from a tensor share its memory, all of which would be saved.
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
