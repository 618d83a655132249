"""A transformers config from whatever a user gives, and the model shape that it describes.

No family needs a formula for its shape. The model is built on the meta device, where it takes no
memory, and two meta tokens run through it with an attention function that notes each layer's heads,
their widths and the window. Matrices are counted from the parameters themselves; of a mixture's
experts (the parameters with three dimensions) as many count as the router chooses for a token.

Cost: building the model, about 2 ms a layer. Families whose layers have no attention or several
attentions are refused, as they cannot be trained on packed rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoConfig, PretrainedConfig

from lightning_wlb.argument_checks import wrong_type
from lightning_wlb.cost.shape import LayerShape, ModelShape, Recurrence
from lightning_wlb.data.tokenising.texts import reason
from lightning_wlb.model_folder_checks import check_counts, check_model, hub_copy, is_here
from lightning_wlb.models.decoder import STORED
from lightning_wlb.models.huggingface.families import row_by_row
from lightning_wlb.models.huggingface.model_parts import blank_model
from lightning_wlb.models.huggingface.recurrent import FAMILIES, by_segments


def read_config(config: PretrainedConfig | Mapping[str, Any] | str | Path) -> PretrainedConfig:
    """The config that is given, named or described; only its text part, if it has others.

    Args:
        config: a config; a folder with a ``config.json``, that file, or a name on the hub; or a
            mapping of a config's fields, with ``model_type``.

    Raises:
        ValueError: the config is not understood; the message says what can be given.
    """
    understood = _read(config)
    text = understood.get_text_config()
    _check_fields(text.to_dict())
    if text is not understood:
        rank_zero_warn(
            f"Model type {understood.model_type!r} takes more than text. Only its language model,"
            f" {text.model_type!r}, is built, read and trained."
        )
    return text


def _read(config: PretrainedConfig | Mapping[str, Any] | str | Path) -> PretrainedConfig:
    if isinstance(config, PretrainedConfig):
        return config
    if isinstance(config, Mapping):
        kind = config.get("model_type")
        if kind not in CONFIG_MAPPING:
            raise ValueError(
                f"A Hugging Face config with model_type={kind!r}, which transformers does not know."
                " Give the fields of a config.json, among them one such as model_type: llama."
            )
        _check_fields(config)
        return _from_fields(CONFIG_MAPPING[kind], dict(config))
    if isinstance(config, str | Path):
        try:
            # If it is set, the name may come from a checkpoint that somebody else has made.
            fetch = STORED.get() is None
            path = Path(config)
            if not is_here(config):
                path = hub_copy(str(config), ["config*.json"], fetch)
            check_model(path)
            # Reading a config makes some families build a list with an entry for each layer.
            _check_fields(PretrainedConfig.get_config_dict(path, local_files_only=True)[0])
            return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # an invalid file can raise anything
            raise ValueError(
                f"{str(config)!r} is neither a folder with a config.json, nor that file, nor a name"
                f" on the hub that transformers can reach: {reason(error)}"
            ) from error
    wanted = "a folder with a config.json, that file, a name on the hub, a transformers"
    raise wrong_type("config", config, f"{wanted} PretrainedConfig or a mapping of its fields")


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse a config with more layers, heads or experts than can be built, or a wrong dtype."""
    check_counts(fields)
    items = list(fields.items())
    for name, value in items:
        if isinstance(value, Mapping):
            items += value.items()
        elif name in ("dtype", "torch_dtype") and isinstance(value, str):
            found = getattr(torch, value.removeprefix("torch."), None)
            if not isinstance(found, torch.dtype):
                raise ValueError(f"The config has {name}={value!r}, which is no dtype of torch.")


def _from_fields(kind: type[PretrainedConfig], fields: dict[str, Any]) -> PretrainedConfig:
    """A config of a family, with a warning about unknown fields, which change nothing.

    Raises:
        ValueError: a field of another type, contradictory sizes, or an unknown field whose name is
            similar to a known one, unless transformers wrote the mapping (with its version).
    """
    known = {*kind().to_dict(), *kind.attribute_map, *dir(kind)}
    unknown = sorted(set(fields) - known)
    # For each unknown field all fields are read again: many long fields would take seconds.
    if len(unknown) * len(str(fields)) > 3_000_000:
        raise ValueError(
            f"The config of model type {kind.model_type!r} has {len(unknown):,} fields that it does"
            f" not know, such as {unknown[0]!r:.80}: too many for its length. Leave them out."
        )
    try:
        config = kind.from_dict(copy.deepcopy(fields))
        understood = config.to_dict()
        for name in unknown:
            without = copy.deepcopy(fields)
            value = without.pop(name)
            # Some old names, such as rope_theta, are read and stored under another name.
            if kind.from_dict(without).to_dict() | {name: value} != understood:
                continue
            message = f"The config of model type {kind.model_type!r} has no field {name!r}"
            near = get_close_matches(name, known, 1)
            if near and "transformers_version" not in fields:
                raise ValueError(f"{message}. Is {near[0]!r} meant? Else leave it out.")
            rank_zero_warn(f"{message}; it changes nothing.")
        return config
    except StrictDataclassError as error:
        raise ValueError(f"The config of model type {kind.model_type!r}: {error}") from error


def positions_warning(config: PretrainedConfig, context_window: int) -> str | None:
    """A warning if a context window has more tokens than the config has positions, else None."""
    known = getattr(config, "max_position_embeddings", None)
    if not known or context_window <= known:
        return None
    return (
        f"context_window={context_window}, but the config was made for"
        f" max_position_embeddings={known} positions. To extend the model, set"
        " max_position_embeddings, and rope scaling if needed, in the config, which exports hold."
    )


def shape_of(config: PretrainedConfig) -> ModelShape:
    """The shape of the decoder that a config describes.

    Any family that ``AutoModelForCausalLM`` builds; if it reads more than text, its text decoder.

    Raises:
        ValueError: the family's layers do not call attention once each, its experts are chosen in
            an unknown way, or ``AutoModelForCausalLM`` cannot build it.
    """
    config = config.get_text_config()
    seen = _Seen({}, {}, {})
    AttentionInterface.register(_PROBE, partial(_note_attention, seen))
    try:
        model = blank_model(config, _PROBE, torch.float32)
    except Exception as error:  # an invalid config can raise anything
        raise ValueError(
            f"model type {config.model_type!r} cannot be built as a causal language model by"
            f" transformers: {reason(error)}"
        ) from error
    base = getattr(model, model.base_model_prefix)
    if config.model_type in FAMILIES:
        by_segments([base], config.model_type, seen.recurrent)
    vocab_size, dim = model.get_output_embeddings().weight.shape
    _run_two_tokens(base, dim, seen)
    between = row_by_row(config) if config.model_type in FAMILIES else ()
    layers = [
        _layer_shape(layer, seen, number in between)
        for number, layer in enumerate(_layers(base, seen))
    ]
    return ModelShape.of_layers(dim, vocab_size, layers)


_PROBE = "lightning_wlb_probe"  # the attention function's name in transformers
_SIZES = ("heads", "kv_heads", "head_dim", "value_dim")


class _Seen(NamedTuple):
    """What two tokens passed: by module, calls of attention, numbers of experts, recurrences.

    For each call of attention it has the sizes, named as in :class:`.LayerShape`.
    """

    attention: dict[nn.Module, list[dict[str, Any]]]
    experts: dict[nn.Module, int]
    recurrent: dict[nn.Module, Recurrence]


def _note_attention(
    seen: _Seen,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    **others: Any,
) -> tuple[Tensor, None]:
    """Note a call of attention on [1, heads, tokens, width], without computing it."""
    sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    call = dict(zip(_SIZES, sizes, strict=True)) | {"sliding_window": others.get("sliding_window")}
    seen.attention.setdefault(module, []).append(call)
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _note_experts(
    seen: _Seen, module: nn.Module, hidden: Tensor, *arguments: Any, **options: Any
) -> Tensor:
    """Note the number of experts of a token, in place of a forward that needs values."""
    for given in (*arguments, *options.values()):
        if isinstance(given, Tensor) and given.dtype in (torch.int64, torch.int32):
            seen.experts[module] = given.shape[-1]  # the router's choice
    return torch.empty_like(hidden)


def _run_two_tokens(base: nn.Module, dim: int, seen: _Seen) -> None:
    for module in base.modules():
        stacked = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
        if stacked and not isinstance(module, nn.Conv1d):
            module.forward = partial(_note_experts, seen, module)
    try:
        with torch.no_grad():
            base(
                inputs_embeds=torch.empty(1, 2, dim, device="meta"),
                position_ids=torch.zeros(1, 2, dtype=torch.int64, device="meta"),
                use_cache=False,
            )
    except Exception as error:
        raise ValueError(
            f"{type(base).__name__} does not run on embeddings and positions alone, without looking"
            f" at values: {type(error).__name__}: {error}. Choose another family."
        ) from error


def _layers(base: nn.Module, seen: _Seen) -> Iterable[nn.Module]:
    """The base model's list of layers: the list whose modules call attention."""
    lists = [
        child
        for child in base.children()
        if isinstance(child, nn.ModuleList)
        and not seen.attention.keys().isdisjoint(child.modules())
    ]
    if len(lists) != 1:
        raise ValueError(
            f"{type(base).__name__} has {len(lists)} lists of layers that call attention through"
            " transformers' attention interface, but a decoder here has one. Choose another family."
        )
    return lists[0]


def _layer_shape(layer: nn.Module, seen: _Seen, row_by_row: bool) -> LayerShape:
    """The shape of a layer with one attention or recurrence, or with neither (``row_by_row``)."""
    modules = [module for module in layer.modules() if module in seen.attention]
    calls = [call for module in modules for call in seen.attention[module]]
    recurrent = [module for module in layer.modules() if module in seen.recurrent]
    recurrence = None
    if not calls and (row_by_row or len(recurrent) == 1):
        recurrence = seen.recurrent[recurrent[0]] if recurrent else Recurrence()
        modules, calls = recurrent, [dict.fromkeys(_SIZES, 1)]
    elif len(calls) != 1 or recurrent:
        raise ValueError(
            f"{type(layer).__name__} calls attention {len(calls)} times, through transformers'"
            " attention interface, but a layer here calls it once. Choose another family."
        )
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    attention = feed_forward = idle = vectors = 0
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            size = parameter.numel()
            if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):
                met = _met(module, parameter, seen)
                feed_forward += met
                idle += size - met
            elif parameter.ndim < 2 or name.endswith("bias") or isinstance(module, nn.Conv1d):
                vectors += size
            elif id(parameter) in own:
                attention += size
            else:
                feed_forward += size
    return LayerShape(
        **calls[0],
        attention_parameters=attention,
        feed_forward_parameters=feed_forward,
        idle_parameters=idle,
        vector_parameters=vectors,
        recurrence=recurrence,
    )


def _met(module: nn.Module, parameter: nn.Parameter, seen: _Seen) -> int:
    """The elements of stacked experts' matrices [experts, ...] that a token uses."""
    if module not in seen.experts:
        raise ValueError(
            f"{type(module).__name__} is not told which experts a token is sent to, so the work of"
            " a token is not known. Choose another family."
        )
    return parameter.numel() // parameter.shape[0] * seen.experts[module]
