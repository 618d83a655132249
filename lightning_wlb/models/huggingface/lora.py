"""Low-rank adapters (LoRA, Hu et al., 2021) on a frozen Hugging Face model, by peft's own modules.

peft replaces linear modules by its own before the model is taken apart, so that a forward is peft's
code. A trained run's checkpoint and export hold only the adapters.

Not all options of peft are exact on packed rows or on a mesh. Fields that are not in :data:`FIELDS`
are refused: dropout (other numbers on every mesh), DoRA and other variants (their extra parameters
would need more rules for tensor parallelism), and initial values computed from the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_wlb.argument_checks import flag, number, whole, wrong_type
from lightning_wlb.models.decoder import seed_of

FIELDS = (
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "use_rslora",
    "init_lora_weights",
    "rank_pattern",
    "alpha_pattern",
)
"""Fields of peft's ``LoraConfig`` that may be given."""

_NAME_LENGTH, _MOST_WAYS, _MOST_NAMES, _MOST_PATTERNS = 60, 10**7, 10_000, 500
_ADAPTER = re.compile(r"\.lora_([AB])\.default\.weight$")
# Fields that are accepted only with these values, with which they change nothing.
_NEUTRAL: dict[str, Any] = {"lora_dropout": 0.0, "bias": "none", "task_type": "CAUSAL_LM"}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return _ADAPTER.search(name) is not None


def base_name(name: str) -> str:
    """A frozen parameter's name in the model without adapters."""
    return name.replace(".base_layer", "")


def checked_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The user's fields of a ``LoraConfig``; ValueError for fields that are not exact on a mesh."""
    if not isinstance(given, Mapping):
        wanted = "fields of peft's LoraConfig, as {'r': 16, 'lora_alpha': 32}"
        raise wrong_type("lora", given, wanted)
    unknown = sorted(set(given) - {*FIELDS, *_NEUTRAL})
    if unknown:
        raise ValueError(
            f"lora: {', '.join(unknown)} cannot be set. Known are {', '.join(FIELDS)}, as in"
            " {'r': 16, 'lora_alpha': 32, 'target_modules': 'all-linear'}."
        )
    for field, neutral in _NEUTRAL.items():
        if given.get(field, neutral) != neutral:
            raise ValueError(
                f"lora: {field}={given[field]!r}. Only {neutral!r} gives the same numbers on every"
                " mesh; leave the field out."
            )
    if given.get("init_lora_weights", True) not in (True, "gaussian"):
        raise ValueError(
            f"lora: init_lora_weights={given['init_lora_weights']!r}. Give True (peft's default) or"
            " 'gaussian'; others are made from weights that no rank holds whole."
        )
    whole("lora: r", given.get("r", 8), 1)
    number("lora: lora_alpha", given.get("lora_alpha", 8), 0, above=True)
    flag("lora: use_rslora", given.get("use_rslora", False))
    for pattern, rank in (given.get("rank_pattern") or {}).items():
        whole(f"lora: rank_pattern of {pattern!r}", rank, 1)
    for pattern, alpha in (given.get("alpha_pattern") or {}).items():
        number(f"lora: alpha_pattern of {pattern!r}", alpha, 0, above=True)
    modules = [given.get(name) for name in ("target_modules", "exclude_modules")]
    ranks = [given.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    for each in filter(None, (*modules, *ranks)):
        # peft compares each name with all others, and beyond 512 recompiles patterns each time.
        most = _MOST_PATTERNS if isinstance(each, Mapping) else _MOST_NAMES
        if not isinstance(each, str) and len(each) > most:
            raise ValueError(
                f"lora: a list of {len(each):,} modules, beyond {most:,}, may take for ever"
                " to match. Give a regular expression instead."
            )
    _check_ends(*(each for each in modules if isinstance(each, str)), *chain(*ranks))
    return {name: given[name] for name in FIELDS if name in given}


def _check_ends(*patterns: str) -> None:
    """Refuse expressions that together may take for ever, such as repetitions of repetitions."""
    ways = 0.0
    for each in patterns:
        try:
            ways += _ways(re._parser.parse(each))  # type: ignore[attr-defined]
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"lora: {each[:99]!r} is no regular expression ({error}).") from error
        if ways > _MOST_WAYS:
            raise ValueError(
                f"lora: the expression {each[:99]!r} may take for ever to match, with those before"
                " it: it repeats what repeats, has choices or may be empty, or repeats too often."
                " Give a list of modules instead."
            )


def _ways(part: Any) -> float:
    """The most ways in which a part of a parsed expression may match a module's name."""
    if not isinstance(part, tuple) or not part:
        return math.prod(map(_ways, getattr(part, "data", part if isinstance(part, list) else ())))
    kind, *given = part
    if str(kind).endswith("_REPEAT"):
        least, most, body = given[0]
        if least > 1 and body.getwidth()[0] == 0:
            return math.inf  # an empty match may repeat even after the name has ended
        inner, lengths = _ways(body), min(int(most) - int(least), _NAME_LENGTH) + 1
        return lengths * inner if inner == 1 or most <= 1 else math.inf
    if str(kind) == "BRANCH":
        return sum(map(_ways, given[0][1]))
    return math.prod(map(_ways, given))


def peft_config(given: Mapping[str, Any], **more: Any) -> Any:
    """Peft's ``LoraConfig``; without peft ModuleNotFoundError, which names the extra."""
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"lora needs {error.name}: pip install 'lightning-wlb[hf]'", name=error.name
        ) from error

    return LoraConfig(**checked_fields(given), task_type="CAUSAL_LM", **more)


def same_adapters(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two sets of fields describe the same adapters, whatever their initial values."""
    if one is None or other is None:
        return one is other
    first, second = (
        peft_config(dict(each) | {"init_lora_weights": True}).to_dict() for each in (one, other)
    )
    return bool(first == second)


def inject(causal: Any, given: Mapping[str, Any], layers: str) -> None:
    """Put adapters into a ``ForCausalLM``, in place; everything else is frozen.

    Args:
        causal: the whole model, on the meta device or not.
        given: fields of ``LoraConfig``.
        layers: the name of the model's list of layers.

    Raises:
        ValueError: ``target_modules`` names modules that are outside the layers or not linear, or
            none in some layer; or a pattern of ranks or alphas names no module with an adapter.
    """
    config = peft_config(given)
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear
    from peft.utils.other import get_pattern_key

    linear = {name for name, each in causal.named_modules() if isinstance(each, nn.Linear)}
    try:
        inject_adapter_in_model(config, causal)
    except ValueError as error:
        parts = sorted({name.rpartition(".")[2] for name in linear if name.startswith(layers)})
        raise ValueError(
            f"lora: target_modules={given.get('target_modules')!r} does not fit"
            f" {type(causal).__name__}: {error} It has the linear modules {', '.join(parts)}."
        ) from error
    adapters = [name for name, each in causal.named_parameters() if each.requires_grad]
    others = [
        name
        for name in adapters
        if not name.startswith(f"{layers}.")
        or not is_adapter(name)
        or type(causal.get_submodule(name.partition(".lora_")[0])) is not Linear
    ]
    if others:
        raise ValueError(
            f"lora: target_modules={given.get('target_modules')!r} makes adapters"
            f" {', '.join(others[:3])}. Only linear modules of the layers can have them, not the"
            " embedding, the head or experts. Name the modules, as ['q_proj', 'v_proj']: in a"
            " mixture of experts peft takes 'all-linear' and 'gate_proj' for the experts too."
        )
    within = {name.removeprefix(f"{layers}.").partition(".")[0] for name in adapters}
    without = [
        number for number in range(len(causal.get_submodule(layers))) if str(number) not in within
    ]
    if without:
        raise ValueError(
            f"lora: target_modules={given.get('target_modules')!r} names nothing in layers"
            f" {without}. A pipeline stage of these would have nothing to train or to save; name a"
            " module that each layer has, as 'o_proj'."
        )
    adapted = {name.partition(".lora_")[0] for name in adapters}
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in given.get(field) or {}:
            # peft would ignore the pattern.
            if not any(get_pattern_key([pattern], name) == pattern for name in adapted):
                raise ValueError(
                    f"lora: {field} has {pattern!r}, which names no module with an adapter. Give"
                    " the end of a module's name, as 'q_proj', or a regular expression for it."
                )


def initial_value(name: str, shape: Iterable[int], seed: int, given: Mapping[str, Any]) -> Tensor:
    """An adapter's whole initial value by peft's rule, float32 on the CPU: B is zero.

    It depends only on the run's seed and the parameter's name, so it is the same on any mesh.
    """
    values = torch.zeros(tuple(shape), dtype=torch.float32, device="cpu")
    found = _ADAPTER.search(name)
    assert found is not None
    if found[1] == "A":
        generator = torch.Generator().manual_seed(seed_of(seed, name))
        if given.get("init_lora_weights") == "gaussian":
            values.normal_(std=1 / values.shape[0], generator=generator)
        else:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values


def keep_adapters_only(decoder: nn.Module) -> None:
    """Leave frozen parameters out of the decoder's state dict, and let it load without them."""

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in [each for each in state if each.startswith(prefix) and not is_adapter(each)]:
            del state[name]

    def do_not_miss(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if is_adapter(name)]

    decoder.register_state_dict_post_hook(leave_out)
    decoder.register_load_state_dict_post_hook(do_not_miss)
