"""Parses the text of options that commands share: models, meshes, document lengths."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_wlb.adapters.plan_step import MOST_TOKENS
from lightning_wlb.argument_checks import whole
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.file_checks import check_regular, read_bytes
from lightning_wlb.mesh import AXES
from lightning_wlb.models.config import PRESETS, TransformerConfig, as_config
from lightning_wlb.planning.synthetic_lengths import documents_for, generator_a

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_YAML = (".yaml", ".yml")
_MOST_YAML_BYTES, _MOST_TEXT_BYTES = 1 << 20, 1 << 30
_MOST_EXPANDED = 10_000_000  # characters of a YAML file, with what its aliases stand for


def add_model(parser: argparse._ActionsContainer, also: str = "") -> None:
    """Define ``--model``; ``also`` adds to the help forms that :func:`model_config` lacks."""
    parser.add_argument(
        "--model",
        required=True,
        help=f"{', '.join(PRESETS)}{also}; each may be followed by fields that replace its own, as"
        " in 7b,layers=16 (dim, layers, heads, kv_heads, ffn_dim, vocab_size, ...)",
    )


def model_config(text: str) -> TransformerConfig:
    """A model from ``7b``, ``7b,layers=16``, or ``dim=128``, which changes ``tiny``."""
    name, changes = _with_changes(text)
    return TransformerConfig.preset(name or "tiny", **changes)


def _with_changes(text: str) -> tuple[str, dict[str, Any]]:
    """``7b`` and ``{"layers": 16}`` from ``7b,layers=16``; values are JSON, or else text."""
    first, *words = text.split(",")
    if "=" in first:
        first, words = "", [first, *words]
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"--model {text!r}: {word!r} is no name=value, as in layers=32.")
        if name in changes:
            raise ValueError(f"--model {text!r} gives {name} twice. Give it once.")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            changes[name] = value
    return first, changes


@dataclass(frozen=True)
class GivenModel:
    """The model that ``plan --model`` names."""

    shape: ModelShape
    changes: Mapping[str, Any] = field(default_factory=dict)  #: fields that replace its own
    file: str = ""  #: the LightningCLI YAML that it is in, if it is in one
    #: the other arguments of the model's class in that file, without ``config``
    settings: Mapping[str, Any] = field(default_factory=dict)
    foreign: PretrainedConfig | None = None  #: its Hugging Face config, if it has one


def given_model(text: str) -> GivenModel:
    """A model of any kind that ``plan --model`` takes.

    Args:
        text: as for :func:`model_config`; or a folder with a Hugging Face ``config.json``, that
            file, or a LightningCLI YAML whose model has a config; or a name on the hub, with a
            slash in it; any with changes, as in ``run.yaml,vocab_size=50000``.
    """
    first, changes = _with_changes(text)
    path = Path(first)
    if not first or not (path.exists() or "/" in first or path.suffix in (".json", *_YAML)):
        return GivenModel(model_config(text).shape, changes)
    file, settings = "", dict[str, Any]()
    config: Any = first
    if path.suffix in _YAML:
        file, settings = first, _settings_in(path)
        config = settings.pop("config")
    if isinstance(config, str) and config in PRESETS:
        shape = TransformerConfig.preset(config, **changes).shape
    elif isinstance(config, Mapping) and "model_type" not in config:
        shape = as_config({**config, **changes}).shape
    else:
        from lightning_wlb.models.huggingface.config_and_shape import read_config, shape_of

        if changes and not isinstance(config, Mapping):
            config = read_config(config).to_dict()
            del config["transformers_version"]
        foreign = read_config({**config, **changes} if changes else config)
        return GivenModel(shape_of(foreign), changes, file, settings, foreign)
    return GivenModel(shape, changes, file, settings)


def _settings_in(path: Path) -> dict[str, Any]:
    """The arguments of the model in a LightningCLI YAML; its ``config`` is among them."""
    try:
        model = _parsed_yaml(read_bytes(path, _MOST_YAML_BYTES).decode())["model"]
        settings = dict(model.get("init_args", model))
        return {**settings, "config": settings["config"]}
    except OSError as error:
        raise ValueError(f"--model {path}: {error.strerror or error}.") from error
    except Exception as error:  # a forged file can lead to any
        raise ValueError(
            f"--model {path} has no model with a config, as a LightningCLI YAML has under 'model',"
            f" 'init_args', 'config': {error!r}."
        ) from error


def _parsed_yaml(text: str) -> Any:
    """Parse YAML; numbers to base 60 (1:30) stay texts, as in YAML 1.2: long ones take hours."""
    import yaml

    root = yaml.compose(text, yaml.SafeLoader)
    if _expanded(root, {}) > _MOST_EXPANDED:
        raise ValueError("its aliases stand for too much")
    return yaml.SafeLoader("").construct_document(root)


def _expanded(node: Any, known: dict[int, int]) -> int:
    """Characters of a YAML node once its aliases are expanded; a huge number if it holds itself.

    A number with a colon becomes a text, in place.
    """
    if id(node) not in known:
        known[id(node)] = _MOST_EXPANDED + 1  # until it is counted: this node may hold itself
        if ":" in node.value and node.tag.endswith((":int", ":float")):
            node.tag = "tag:yaml.org,2002:str"
        parts = node.value if isinstance(node.value, list) else ()
        pairs = (part if isinstance(part, tuple) else (part,) for part in parts)
        below = (_expanded(each, known) for pair in pairs for each in pair)
        known[id(node)] = sum(below, len(node.value) + 1)
    return known[id(node)]


def sizes_of(mesh: str) -> dict[str, int]:
    """The sizes that ``--mesh`` gives, by axis; those that are ``auto`` are left out."""
    words = ["auto"] * len(AXES) if mesh == "auto" else mesh.split(",")
    if len(words) != len(AXES) or not all(word == "auto" or word.isdecimal() for word in words):
        raise ValueError(
            f"--mesh {mesh!r} is neither auto nor data,pipeline,context,tensor, each a whole number"
            " or auto, as in 1,4,2,8 or auto,2,auto,1."
        )
    return {axis: int(word) for axis, word in zip(AXES, words, strict=True) if word != "auto"}


Lengths = npt.NDArray[np.int64]

GENERATOR_A = "generator-a"

STORE_FILES = (".arrow", ".parquet", ".bin", ".idx", ".jsonl", ".jsonl.gz")
"""Endings of files that hold documents; any other file holds lengths."""


def load_lengths(
    source: str,
    *,
    context_window: int,
    micro_batches: int,
    steps: int,
    seed: int,
    vocab_size: int = 0,
) -> Lengths:
    """Lengths in tokens, int64 [documents].

    Args:
        source: ``"generator-a"``, or the path of a ``.npy`` file with integers or of a text file
            with one integer per line or word. A file of :data:`STORE_FILES`, a mapping such as
            ``{path: corpus, column: ids}`` in YAML, and any source that is no file, is opened
            as :class:`.WLBDataModule` opens its documents.
        context_window: bounds the generator's documents.
        micro_batches: per global batch; with ``steps``, how many documents are generated.
        vocab_size: the model's, which may not be less than the documents'; 0: not known.
    """
    # Checked here, since wrong values would generate documents for ever.
    context_window = whole("context_window", context_window, 1)
    micro_batches, steps = whole("micro_batches", micro_batches, 1), whole("steps", steps, 1)
    if source == GENERATOR_A:
        return _generated(context_window, micro_batches, steps, seed)
    path = Path(source)
    if source == "stdlib" or path.name.endswith(STORE_FILES) or not path.is_file():
        return _lengths_of_documents(source, vocab_size)
    return _lengths_in_file(path)


def _generated(context_window: int, micro_batches: int, steps: int, seed: int) -> Lengths:
    """Lengths by the generator of long-context pretraining, enough for ``steps`` steps."""
    count = documents_for(steps, micro_batches, context_window)
    # Documents may be shorter than on average, in short windows or by chance over a few steps;
    # without more of them the last step would be the rest of an epoch.
    while True:
        lengths = generator_a(count, context_window, seed)
        tokens = int(lengths.sum())
        # Half a window of the last step may be missing.
        if 2 * tokens >= (2 * steps * micro_batches + 1) * context_window:
            return lengths
        count *= 2


def _lengths_of_documents(source: str, vocab_size: int) -> Lengths:
    # Documents need pyarrow and torch, plain lengths do not.
    import yaml

    from lightning_wlb.data.open_documents import documents
    from lightning_wlb.data.stores.mixture import MixedDocuments

    try:
        store = documents(_parsed_yaml(source) if source.lstrip().startswith("{") else source)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"--lengths: {error} Or give {GENERATOR_A}, or a file of lengths."
        ) from error
    if isinstance(store, MixedDocuments):
        raise ValueError(
            "--lengths: a mixture takes its stores in other proportions than those of their"
            " documents, which plan does not know. Give its stores one by one."
        )
    if store.vocab_size is not None and 0 < vocab_size < store.vocab_size:
        raise ValueError(
            f"--lengths: the documents have {store.vocab_size} different tokens, the model a"
            f" vocabulary of {vocab_size}. Give --model ...,vocab_size={store.vocab_size} or more."
        )
    return store.lengths


def _lengths_in_file(path: Path) -> Lengths:
    known = f"--lengths takes {GENERATOR_A}, stdlib, a file of lengths, or documents"
    try:
        if path.suffix == ".npy":
            check_regular(path)
            # Mapped: a file that claims a size must have it.
            values: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
        else:
            values = np.array([int(word) for word in read_bytes(path, _MOST_TEXT_BYTES).split()])
    except OSError as error:
        raise ValueError(f"--lengths {path}: {error.strerror or error}. {known}.") from error
    except (ValueError, OverflowError, EOFError) as error:
        raise ValueError(
            f"--lengths {path} is not a list of lengths: {error}. {known}: integers, in .npy or"
            " as text with one per line."
        ) from error
    if values.ndim != 1 or values.dtype.kind not in "iu" or len(values) == 0:
        raise ValueError(
            f"--lengths {path} holds an array of {values.dtype} with shape {values.shape}, but"
            " lengths are integers in one dimension, at least one."
        )
    if not 1 <= values.min() <= values.max() <= MOST_TOKENS:
        raise ValueError(
            f"--lengths {path} has lengths from {values.min()} to {values.max()}, but documents"
            f" have 1 to {MOST_TOKENS:,} tokens."
        )
    return values.astype(np.int64)
