"""Tensor and sequence parallelism of a family's own modules, by their config's plan.

transformers' configs name a *style* for each module of a layer (``base_model_tp_plan``).
:func:`split_of` says what a style means for a parameter, and hooks around modules implement it for
rows. Between layers each rank holds its share of the rows. A *block* is a direct child of a layer
that holds split parameters or attends. Within a block each rank holds all rows, but only its heads
or columns. So rows are gathered before a block. The backward of this gather sums the ranks'
gradients while the gradients of weights are computed (:mod:`.late_gradients`). After a block:

* an output that is a plain sum over ranks (:func:`output_is_sum`) is reduced and scattered by rows;
* else each row-wise module's output is summed on every rank, as transformers' plans require, each
  rank computes the rest of the block for all rows, and takes its own rows at the end.

In both cases the gradient of a parameter that every rank holds whole is a part of a sum, as
:func:`~.tensor_parallel.local` requires.

Parameters are DTensors. While a forward runs, a module reads the rank's shard of a parameter
(:func:`present_shards`); otherwise it reads the DTensor, which the optimizer needs. ``packed``
parameters hold two matrices in one dim, gate before up, so that a rank's share would be two pieces.
They are held with that dim as two, ``[.., 2, f, ..]``, on every mesh, so that shares are
rectangles; the family's code reads them in their original shape.

Cost of the second kind of block: an all-reduce in place of a reduce-scatter, and the replicated
part is computed TP times. If a family's plan gathers a projection's columns (Phi-3, OLMo 2), and in
latent attention, every rank computes attention of all heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_wlb.distributed.process_groups import group_rank, group_size
from lightning_wlb.models.huggingface.attention import RUNNING
from lightning_wlb.models.huggingface.late_gradients import forget_late, gather_late, late_linear
from lightning_wlb.models.tensor_parallel import gather_rows, local, scatter_rows

_REPLICATE = "replicate"
# LoRA's B after a row-wise A: whole on each rank, and applied to the rank's part of the sum.
_BEHIND_ROWS = "behind rowwise"

# Style -> the dim that is split, counted from the end; a vector's only dim.
_DIMS = {
    "colwise": -2,
    "colwise_gather_output": -2,
    "rowwise": -1,
    "rowwise_split_input": -1,
    "last": -1,
    "packed_colwise": -2,
    "packed_rowwise": -1,
}
_REPLICATED = {_REPLICATE, _BEHIND_ROWS, "replicated_with_grad_allreduce", "mla_kv_a_proj"}
# Modules of these styles return a summand of a sum over the ranks.
_ROWWISE = {"rowwise", "rowwise_split_input", "moe_tp_experts"}


@dataclass(frozen=True)
class Split:
    """How one parameter of a layer is split over tensor-parallel ranks."""

    style: str  #: transformers' name, or one of this module's names
    #: the dim that is split; None if every rank holds the whole parameter
    dim: int | None = None
    packed: bool = False  #: whether that dim holds two matrices, and so is held as two dims
    #: the number of key/value heads if the parameter is split by them, else 0. With more ranks than
    #: heads, each rank holds all heads and reads its own
    shares: int = 0
    #: whether it is a bias that belongs after a sum over ranks: each rank adds an equal part of it
    once: bool = False

    def placement(self, size: int) -> Placement:
        """The DTensor placement of the parameter, in its held shape, on ``size`` ranks."""
        if self.dim is None or 0 < self.shares < size:
            return Replicate()
        # In a packed parameter a dim for the two matrices precedes the split dim.
        return Shard(self.dim + 1 if self.packed else self.dim)


def without_adapters(name: str) -> str:
    """The name of a parameter or module in the model without LoRA adapters."""
    return re.sub(r"\.(base_layer|lora_[AB]\.[^.]+)(?=\.|$)", "", name)


def plan_name(name: str) -> str:
    """A parameter's or module's name in plans: ``layers.3.mlp`` becomes ``layers.*.mlp``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", without_adapters(name))


def split_of(name: str, shape: Sequence[int], plan: Mapping[str, str], kv_heads: int) -> Split:
    """How a parameter is split, by the style that the plan gives it or its module.

    The plan's keys are names by :func:`plan_name`; parameters that it does not name are replicated.
    ``shape`` is the family's, and ``kv_heads`` the layer's.

    Raises:
        ValueError: an unknown style, or one that does not say how to split the parameter.
    """
    dims = len(shape)
    place = plan_name(name)
    adapter = re.search(r"\.lora_([AB])\.[^.]+\.weight$", name)
    style = plan.get(place, plan.get(place.rpartition(".")[0], _REPLICATE))
    if adapter:
        style = _of_adapter(style, adapter[1])
    if style == _REPLICATE and dims == 2 and re.search(r"\.[qk]_norm\.weight$", place):
        style = "colwise"  # has a row for each head, as in Command R+, but is not in plans
    is_bias = dims == 1 and name.endswith("bias") and style in _ROWWISE
    if is_bias or style == "once":
        return Split(style, once=True)
    if style in _REPLICATED:
        return Split(style)
    if style not in _DIMS:
        raise ValueError(
            f"tensor parallelism: parameter {name} is of style {style!r}, which says nothing of how"
            " to split it, or is not known to this version of lightning_wlb. Use"
            " tensor_parallel_size=1 with this family."
        )
    dim = 0 if dims == 1 else dims + _DIMS[style]
    # Queries and outputs are split by query heads, which are at least as many as ranks.
    by_heads = style == "colwise" and re.search(r"\.([kv]_proj|k_norm)\.", f"{place}.") is not None
    return Split(style, dim, style.startswith("packed"), kv_heads if by_heads else 0)


def _of_adapter(style: str, matrix: str) -> str:
    """The style of an adapter's matrix A or B, from the style of the adapted linear layer."""
    if style.startswith("colwise"):
        return style if matrix == "B" else _REPLICATE
    if style.startswith("rowwise"):
        return style if matrix == "A" else _BEHIND_ROWS
    return style


def output_is_sum(hidden_size: int, parameters: Iterable[tuple[Split, tuple[int, ...]]]) -> bool:
    """Whether a block's output is only the sum over ranks of its row-wise modules' outputs.

    Then one reduce-scatter after the block is enough. The output is more than that if a module that
    every rank computes whole also has an output of the hidden size: a shared expert that the plan
    leaves out would be added once for each rank, and a norm inside the block would see a part of
    the sum. ``parameters`` has the split and the family's shape of each parameter in the block.
    """
    return not any(
        split.dim is None
        and not split.once
        and split.style != _BEHIND_ROWS
        and shape[:1] == (hidden_size,)
        for split, shape in parameters
    )


def splits_of(layers: nn.ModuleDict, plan: Mapping[str, str], config: Any) -> dict[str, Split]:
    """:func:`split_of` for each parameter of layers, by its name from ``layers.`` on."""
    splits = {}
    for number, layer in layers.items():
        modules = dict(layer.named_modules())
        for own, parameter in layer.named_parameters():
            name = f"layers.{number}.{own}"
            # The attention module is two names above its projections' weights.
            parent = modules[without_adapters(own).rpartition(".")[0].rpartition(".")[0]]
            splits[name] = split_of(name, parameter.shape, plan, _kv_heads(parent, config))
    return splits


def present_shards(model: nn.Module, splits: Mapping[str, Split]) -> None:
    """Hold packed parameters with two dims, and let forwards read all parameters as local shards.

    A module's class becomes a subclass of the same name with a property for each parameter. Outside
    a forward a property returns the parameter itself.
    """
    for prefix, module in model.named_modules():
        views = {}
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            split = splits.get(f"{prefix}.{name}", Split(_REPLICATE))
            views[name] = partial(_family_view, split, tuple(parameter.shape))
            if split.packed:
                assert split.dim is not None
                held = parameter.detach().unflatten(split.dim, (2, -1))
                module._parameters[name] = nn.Parameter(held, parameter.requires_grad)
        if views:
            module.__dict__["_views"] = views
            module.__class__ = _presenting(cast(Any, type(module)), tuple(sorted(views)))


@cache
def _presenting(base: Any, names: tuple[str, ...]) -> Any:
    def reader(name: str) -> property:
        def read(self: nn.Module) -> Tensor | None:
            parameter = self._parameters[name]
            if parameter is None or RUNNING.get(None) is None:
                return parameter
            return self.__dict__["_views"][name](local(parameter))

        return property(read)

    members: dict[str, Any] = {name: reader(name) for name in names}
    if base.forward is nn.Linear.forward:
        members["forward"] = late_linear
    return type(base.__name__, (base,), members | {"__module__": base.__module__})


def _family_view(split: Split, shape: tuple[int, ...], shard: Tensor) -> Tensor:
    """A rank's shard of a parameter of the family's shape, as the family's code reads it.

    On a single rank the shard is the whole parameter as it is held.
    """
    group = _current_group()
    size = group_size(group)
    if split.packed:
        assert split.dim is not None
        return shard.flatten(split.dim, split.dim + 1)
    if split.once and size > 1:
        # Outputs are summed, so every rank adds an equal part.
        return shard / size
    if 0 < split.shares < size:
        width = shape[0] // split.shares
        first = group_rank(group) * split.shares // size * width
        return shard[first : first + width]
    return shard


def attends(module: nn.Module) -> bool:
    """Whether a part of a layer holds the attention module."""
    return any(hasattr(each, "layer_idx") for each in module.modules())


def _kv_heads(module: nn.Module, config: Any) -> int:
    """Key and value heads of an attention module; they may differ from layer to layer."""
    own = getattr(module, "num_key_value_heads", None)
    groups = getattr(module, "num_key_value_groups", None)
    if own is None and groups is not None:
        own = (getattr(module, "num_heads", None) or config.num_attention_heads) // groups
    return int(own or getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def add_hooks(
    layers: nn.ModuleDict,
    plan: Mapping[str, str],
    splits: Mapping[str, Split],
    shapes: Mapping[str, tuple[int, ...]],
    hidden_size: int,
) -> None:
    """Put the hooks around the blocks of layers; they do nothing on a single rank.

    ``splits`` and the family's ``shapes`` have parameter names that begin with ``layers.``.
    """
    for number, layer in layers.items():
        for child_name, block in layer.named_children():
            prefix = f"layers.{number}.{child_name}"
            names = [f"{prefix}.{own}" for own, _ in block.named_parameters()]
            is_split = any(splits[name].dim is not None for name in names)
            if not is_split and not attends(block):
                continue
            linear = [
                cast(nn.Linear, each)
                for each in block.modules()
                if type(each).forward is late_linear
            ]
            block.register_forward_pre_hook(partial(_gather, linear), with_kwargs=True)
            styles = [
                (module, plan.get(plan_name(f"{prefix}.{name}".rstrip("."))))
                for name, module in block.named_modules()
                # A projection with an adapter has parts of the same plan name, which get no hooks.
                if without_adapters(f".{name}") == f".{name}"
            ]
            for module, style in styles:
                if style == "colwise_gather_output":
                    module.register_forward_hook(_gather_columns)
                if style == "rowwise_split_input":
                    module.register_forward_pre_hook(_own_columns)
            if is_split and output_is_sum(
                hidden_size, [(splits[name], shapes[name]) for name in names]
            ):
                block.register_forward_hook(_scatter)
                continue
            for module, style in styles:
                if style in _ROWWISE:
                    module.register_forward_hook(_sum_over_ranks)
            block.register_forward_hook(_own_rows)


def _current_group() -> ProcessGroup | None:
    """The tensor-parallel group of the forward that is running."""
    run = RUNNING.get(None)
    return None if run is None else run.groups.tensor


def _gather(
    linear: Sequence[nn.Linear], module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """All rows of the hidden states, the first argument; [1, P/TP, dim] -> [1, P, dim].

    ``linear`` are the block's linear layers.
    """
    run, group = RUNNING.get(None), _current_group()
    forget_late(linear)
    if run is None or group is None or group_size(group) == 1:
        return args, kwargs
    (own,) = args[0] if args else kwargs["hidden_states"]
    late = run.groups.chunks is not None and torch.is_grad_enabled() and len(own) > 0
    every = (gather_late(own, group, linear) if late else gather_rows(own, group))[None]
    return ((every, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": every})


def _of_output(change: Callable[[Tensor, ProcessGroup | None], Tensor]) -> Callable[..., Any]:
    """A forward hook that changes a module's output, or the first element of a tuple."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        group = _current_group()
        if group_size(group) == 1:
            return out
        if isinstance(out, tuple):
            return (change(out[0], group), *out[1:])
        return change(out, group)

    return hook


_scatter = _of_output(lambda out, group: scatter_rows(out[0], group)[None])
_own_rows = _of_output(lambda out, group: out.chunk(group_size(group), 1)[group_rank(group)])
_sum_over_ranks = _of_output(
    lambda out, group: gather_rows(scatter_rows(out.flatten(0, -2), group), group).view_as(out)
)
_gather_columns = _of_output(
    lambda out, group: gather_rows(out.movedim(-1, 0).contiguous(), group).movedim(0, -1)
)


def _own_columns(module: nn.Module, args: Any) -> Any:
    group = _current_group()
    size = group_size(group)
    return (args[0].chunk(size, -1)[group_rank(group)], *args[1:]) if size > 1 else args
