"""A transformers config from whatever a user has: a folder, a file, a hub name, fields."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from lightning.pytorch.utilities import rank_zero_warn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig


def read_config(config: PretrainedConfig | Mapping[str, Any] | str | Path) -> PretrainedConfig:
    """The config that is given, named or described; its text part, where it has others.

    Args:
        config: a config; a folder with a ``config.json``, that file, or a name on the hub; or a
            mapping of its fields, ``model_type`` among them.

    Raises:
        ValueError: naming what was given and what can be.
    """
    understood = _read(config)
    text = understood.get_text_config()
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
        return _from_fields(CONFIG_MAPPING[kind], dict(config))
    if isinstance(config, str | Path):
        try:
            return AutoConfig.from_pretrained(str(config))
        except (OSError, ValueError, StrictDataclassError) as error:
            raise ValueError(
                f"{str(config)!r} is neither a folder with a config.json, nor that file, nor a name"
                f" on the hub that transformers can reach: {error}"
            ) from error
    raise ValueError(
        f"A config of type {type(config).__name__}. Give a folder with a config.json, that file, a"
        " name on the hub, a transformers PretrainedConfig or a mapping of its fields."
    )


def _from_fields(kind: type[PretrainedConfig], fields: dict[str, Any]) -> PretrainedConfig:
    """A config of a family, with a warning about fields that the family does not have.

    Raises:
        ValueError: a field of another type, or sizes that contradict each other.
    """
    known = {*kind().to_dict(), *kind.attribute_map, *dir(kind)}
    for name in sorted(set(fields) - known):
        near = get_close_matches(name, known, 1)
        rank_zero_warn(
            f"The config of model type {kind.model_type!r} has no field {name!r}; it changes"
            f" nothing.{f' Is {near[0]!r} meant?' if near else ''}"
        )
    try:
        return kind.from_dict(fields)
    except StrictDataclassError as error:
        raise ValueError(f"The config of model type {kind.model_type!r}: {error}") from error
