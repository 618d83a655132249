"""Pretrained weights into a decoder: each rank reads its own part of each tensor.

The decoder is whole, or one rank's share of any mesh. Of each of its parameters the rank reads the
rectangle that it holds, straight into it (:mod:`.huggingface.sources`), so that beside its share a
rank needs memory for one rectangle of one tensor; in conversions other than renaming, stacking and
joining for the whole tensors of one parameter.

Before anything is read, the folder's names and shapes are held against the model that the config
describes: whatever is missing, too much or of another shape is refused, on every rank alike. For
that every rank reads the headers of all files.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.folder import Box, Folder, open_folder
from lightning_wlb.models.huggingface.initial import parameters_without_memory
from lightning_wlb.models.huggingface.lora import is_adapter
from lightning_wlb.models.huggingface.sources import Source, find_sources
from lightning_wlb.models.initialise import held, share_of

# Dtypes of values as they are. Other dtypes of a weight are codes that a scale belongs to.
_PLAIN = {"F64", "F32", "F16", "BF16"}
# Tables that folders written by old versions of transformers have, and modules compute.
_COMPUTED = r"rotary_emb\.inv_freq"


def load(decoder: HuggingFaceDecoder, folder: str | Path) -> None:
    """Fill the parameters and persistent buffers that this rank holds, but no adapters.

    Args:
        decoder: its parameters have memory, on any device and in any dtype; DTensors or not.
        folder: of a model of the same config, as ``save_pretrained`` writes it.

    Raises:
        ValueError: the folder has no safetensors, or its tensors are not those of the model.
    """
    files = open_folder(Path(folder))
    model = skeleton(decoder.config)
    sources = find_sources(files, model)
    _check(files, sources, model)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if is_adapter(name):
                continue
            source, double = _sources_of(decoder, sources, name)
            family = decoder.family_shape(name)
            for part, box in _family_boxes(parameter.shape, family, share_of(parameter)):
                target = held(parameter)[part]
                source.copy_to(target, box)
                if double is not None:
                    _check_tied(decoder, name, target, double, box)
        for name, buffer in decoder.persistent_buffers():
            whole = tuple(slice(0, size) for size in buffer.shape)
            sources[decoder.family_name(name)].copy_to(buffer, whole)


def skeleton(config: Any) -> Any:
    """The family's ``ForCausalLM``, whose parameters have no memory."""
    with parameters_without_memory():
        # Whatever the folder asks for: some values of it fetch code.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    model.tie_weights()
    return model


def weights_of(model: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a family's model, by all their names."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return state


def _sources_of(
    decoder: HuggingFaceDecoder, sources: Mapping[str, Source], name: str
) -> tuple[Source, Source | None]:
    """What a parameter is read from, and what else is stored for it: a tied one has two names."""
    first = decoder.tied.get(name, name)
    names = [first, *(head for head, embedding in decoder.tied.items() if embedding == first)]
    found = [sources[each] for each in map(decoder.family_name, names) if each in sources]
    return found[0], found[1] if len(found) > 1 else None


def _check_tied(
    decoder: HuggingFaceDecoder, name: str, values: Tensor, double: Source, box: Box
) -> None:
    """Refuse a folder whose two copies of a tied weight differ.

    Raises:
        ValueError: with the remedy.
    """
    other = torch.empty_like(values)
    double.copy_to(other, box)
    if not torch.equal(values, other):
        raise ValueError(
            f"the config ties {decoder.family_name(name)} to the model's other end, but the folder"
            " stores other values there. Set tie_word_embeddings=False in the config."
        )


def _family_boxes(
    shape: Iterable[int], family: Iterable[int], box: Box
) -> Iterator[tuple[tuple[slice | int, ...], Box]]:
    """The rectangles of the family's shape that a rectangle of the held shape is.

    A packed parameter is held with two dims in place of one of the family's: index i of the first
    is a rectangle of its own.

    Yields:
        Where the rectangle goes in the tensor that the rank holds, and the rectangle itself.
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


def _check(folder: Folder, sources: Mapping[str, Source], model: Any) -> None:
    """Hold the folder's tensors against the model's.

    Raises:
        ValueError: naming those that are missing, too much, of another shape, or quantised.
    """
    state = weights_of(model)
    codes = [
        f"{key} is {dtype}"
        for name, tensor in state.items()
        if name in sources and tensor.is_floating_point()
        for key in sources[name].keys
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
    found = [
        f"{what}: {', '.join(each[:5])}{f' and {len(each) - 5} more' if len(each) > 5 else ''}"
        for what, each in (
            ("missing", missing),
            ("not in the model", unknown),
            ("of another shape", shapes),
        )
        if each
    ]
    if found:
        raise ValueError(
            f"{folder.path} does not hold the weights of {type(model).__name__} of this config;"
            f" {'; '.join(found)}. Give the config of the folder itself, or the folder that"
            " belongs to this config."
        )
