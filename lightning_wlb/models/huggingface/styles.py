"""Tensor parallelism of a Hugging Face family as data: how each parameter of its layers is split.

transformers' configs name a *style* for each planned module (``base_model_tp_plan``). What a style
means for a parameter is here, in ``_DIMS`` and :func:`split_of`; :mod:`.tensor` does it.

``packed`` parameters hold two matrices in one dim, gate before up, so that a rank's share would be
two pieces. They are held with that dim in two, ``[.., 2, f, ..]``, on every mesh, which makes
shares rectangles; the family's code reads them as they were.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

REPLICATE = "replicate"
# A parameter of each rank's own sum of what row-wise modules make: LoRA's B behind a row-wise A.
_BEHIND_ROWS = "behind rowwise"

OWN_PLANS: dict[str, dict[str, str]] = {
    # Families whose config has no plan; transformers' styles, and "once": added by one rank.
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        # Stored transposed, gate and up in turn: a rank's share of the last dim has pairs of them.
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "last",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts.down_proj_bias": "once",
    },
}

# Style -> the dim that is split, from the end; of a vector the only one.
_DIMS = {
    "colwise": -2,
    "colwise_gather_output": -2,
    "rowwise": -1,
    "rowwise_split_input": -1,
    "last": -1,
    "packed_colwise": -2,
    "packed_rowwise": -1,
}
_REPLICATED = {
    REPLICATE,
    _BEHIND_ROWS,
    "once",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
}
# What these modules return is a sum over the ranks.
ROWWISE = {"rowwise", "rowwise_split_input", "moe_tp_experts"}


@dataclass(frozen=True)
class Split:
    """How one parameter of a layer is split over tensor-parallel ranks.

    Args:
        style: transformers' name, or one of this module's.
        dim: the dim that is split; None where every rank holds the whole parameter.
        packed: whether that dim holds two matrices, and so is held as two.
        shares: key/value heads that the parameter has one part for; 0 if it is not split by heads.
            Where there are more ranks than heads, each holds all and reads its own.
        once: whether only one rank's copy is added: a bias behind a sum over the ranks.
    """

    style: str
    dim: int | None = None
    packed: bool = False
    shares: int = 0
    once: bool = False

    def placement(self, size: int) -> Placement:
        """Of the parameter as it is held, on ``size`` ranks."""
        if self.dim is None or 0 < self.shares < size:
            return Replicate()
        # Of a packed parameter the matrix's own dim is behind that of the two.
        return Shard(self.dim + 1 if self.packed else self.dim)

    def held(self, shape: Iterable[int]) -> tuple[int, ...]:
        """The shape in which a parameter of the family's ``shape`` is held."""
        sizes = tuple(shape)
        if not self.packed:
            return sizes
        assert self.dim is not None
        return (*sizes[: self.dim], 2, sizes[self.dim] // 2, *sizes[self.dim + 1 :])


def without_adapters(name: str) -> str:
    """A parameter's or module's name where a module with an adapter is the plain one."""
    return re.sub(r"\.(base_layer|lora_[AB]\.[^.]+)(?=\.|$)", "", name)


def general(name: str) -> str:
    """A parameter's or module's name as plans have it: ``layers.3.mlp`` is ``layers.*.mlp``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", without_adapters(name))


def split_of(name: str, shape: Iterable[int], plan: Mapping[str, str], kv_heads: int) -> Split:
    """How a parameter is split.

    Args:
        name: as in this package's model, ``layers.0.self_attn.q_proj.weight``.
        shape: the family's.
        plan: module or parameter, in general names -> style. What it does not name is replicated.
        kv_heads: key and value heads of the layer.

    Raises:
        ValueError: a style that is not known, or that says nothing of a parameter.
    """
    dims = len(tuple(shape))
    place = general(name)
    adapter = re.search(r"\.lora_([AB])\.[^.]+\.weight$", name)
    style = plan.get(place, plan.get(place.rpartition(".")[0], REPLICATE))
    if adapter:
        style = _of_adapter(style, adapter[1])
    if style == REPLICATE and dims == 2 and re.search(r"\.[qk]_norm\.weight$", place):
        style = "colwise"  # a row for each head, as in Command R+, which plans leave out
    is_bias = dims == 1 and name.endswith("bias") and style in ROWWISE
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
    # Queries and outputs are split by query heads, of which there are at least as many as ranks.
    by_heads = style == "colwise" and re.search(r"\.([kv]_proj|k_norm)\.", f"{place}.") is not None
    return Split(style, dim, style.startswith("packed"), kv_heads if by_heads else 0)


def _of_adapter(style: str, matrix: str) -> str:
    """The style of LoRA's A or B beside a module of the given style; their product is split."""
    if style.startswith("colwise"):
        return style if matrix == "B" else REPLICATE
    if style.startswith("rowwise"):
        return style if matrix == "A" else _BEHIND_ROWS
    return style


def is_sum(hidden_size: int, parameters: Iterable[tuple[str, Split, tuple[int, ...]]]) -> bool:
    """Whether a block's output is nothing but the sum over ranks of what row-wise modules return.

    Then one reduce-scatter behind the block is enough. It is not where anything that every rank
    computes whole also writes the hidden size: a shared expert that the plan leaves out would be
    added once for each rank, and a norm inside the block would see a part of the sum.

    Args:
        hidden_size: width of the residual stream.
        parameters: name, split and the family's shape of each parameter in the block.
    """
    return not any(
        split.dim is None
        and not split.once
        and split.style != _BEHIND_ROWS
        and shape[:1] == (hidden_size,)
        for _, split, shape in parameters
    )
