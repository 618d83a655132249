"""The functions by which transformers computes recurrent layers, for each piece by itself.

Each takes the place of transformers' function of its name in :data:`FUNCTIONS`, has its arguments
behind that function and the layer's number, and calls it for one piece after another, with the
state that an earlier slice has left (:mod:`lightning_wlb.attention.recurrence`). Where ranks share
rows, each computes its heads of all rows; tensor-parallel ranks compute theirs, of projections and
convolutions that each of them has whole.

Cost: a call of the recurrence for each piece of a micro-batch, and one of a convolution. Where
flash-linear-attention is installed, a delta rule on CUDA takes all pieces in one call
(``cu_seqlens``); that call has been made of a stand-in alone. Kernels that fuse convolution and
recurrence are not called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import is_flash_linear_attention_available

from lightning_wlb.attention.recurrence import (
    RecurrentRows,
    State,
    by_segment,
    one_by_one,
    to_all_rows,
    to_own_rows,
)
from lightning_wlb.distributed.process_groups import group_size
from lightning_wlb.models.huggingface.attention import current_run
from lightning_wlb.models.tensor_parallel import gather_rows

CONVOLUTION = "causal_conv1d_fn"
"""The name of every family's convolution."""


def _rows(name: str) -> tuple[RecurrentRows, Any]:
    """Where the running micro-batch's pieces lie, and the group of the ranks that share them."""
    run = current_run()
    rows = run.micro_batch.recurrence
    if rows is None:
        raise ValueError(
            f"{name}: the batch does not say where its documents begin. Make it with"
            " make_step_batch(..., recurrent=True), as WLBDataModule does for such a model."
        )
    return rows, run.groups.of_rows(rows.replicas)


def _check_heads(heads: int, kind: str, *groups: Any) -> None:
    ranks = prod(map(group_size, groups))
    if heads % ranks:
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ValueError(
            f"{ranks} ranks share a recurrent layer's {heads} {kind} (context_parallel_size, times"
            " the replicas that share a micro-batch, times tensor_parallel_size for heads), which"
            f" cannot be spread evenly. Numbers of ranks that go: {sizes}."
        )


def _own(x: Tensor, group: Any, dim: int = 0) -> Tensor:
    """The part of values by head or channel that this rank computes with."""
    return x if group_size(group) == 1 else x.chunk(group_size(group), dim)[dist.get_rank(group)]


def takes_segments(x: Tensor) -> bool:
    """Whether the family calls kernels that take all segments at once (flash-linear-attention)."""
    return x.is_cuda and is_flash_linear_attention_available()


def _heads_of(
    tensors: Sequence[Tensor], heads: int, rows: Any, tensor: Any
) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """What this tensor-parallel rank computes of [1, rows, heads, ...], and what joins the results.

    Tensors with fewer heads (a group of ``heads`` shares one) have them repeated where ranks could
    not be given whole groups.
    """
    _check_heads(heads, "heads", rows, tensor)
    ranks = group_size(rows) * group_size(tensor)
    even = [
        x.repeat_interleave(heads // x.shape[2], dim=2) if x.shape[2] % ranks else x
        for x in tensors
    ]

    def join(out: Tensor) -> Tensor:
        if group_size(tensor) == 1:
            return out
        return gather_rows(out.movedim(2, 0).contiguous(), tensor).movedim(0, 2)

    return [_own(x, tensor, 2) for x in even], join


def _convolution(
    theirs: Callable[..., Tensor],
    layer: int,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """A depthwise causal convolution, [1, channels, rows], weight [channels, kernel]."""
    rows, group = _rows(CONVOLUTION)
    _check_heads(hidden_states.shape[1], "channels", group)
    if not rows.tokens:
        return hidden_states * 0
    (whole,) = to_all_rows([hidden_states[0].t()[..., None]], rows, group)
    front = weight.shape[-1] - 1
    mine, mine_bias = _own(weight, group), None if bias is None else _own(bias, group)

    def compute(
        inputs: Sequence[Tensor],
        tokens: Sequence[int],
        before: Sequence[State | None],
        goes_on: Sequence[bool],
    ) -> tuple[Tensor, Sequence[State | None]]:
        # One call: in front of each segment the rows before it, whose own results are left out.
        (x,) = inputs
        none = x.new_zeros(front, x.shape[1])
        joined = [
            torch.cat([none if state is None else state[0], own])
            for state, own in zip(before, x.split(list(tokens)), strict=True)
        ]
        out = theirs(torch.cat(joined).t()[None], mine, mine_bias, activation=activation)[0].t()
        kept = [each[front:] for each in out.split([len(each) for each in joined])]
        ends = [
            (each[len(each) - front :].clone(),) if wanted else None
            for each, wanted in zip(joined, goes_on, strict=True)
        ]
        return torch.cat(kept), ends

    out = by_segment(rows, (layer, CONVOLUTION), [whole[..., 0]], compute)
    return to_own_rows(out[..., None], hidden_states.shape[2], rows, group)[..., 0].t()[None]


def _delta_rule(
    theirs: Callable[..., Any],
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """A gated delta rule: [1, rows, heads, width], with decays ``g`` by head or by channel."""
    rows, group = _rows("the gated delta rule")
    if not rows.tokens:
        return value * 0, None
    every = (query, key, value, g, beta)
    mine, join = _heads_of(every, value.shape[2], group, current_run().groups.tensor)
    inputs = to_all_rows([x[0] for x in mine], rows, group)

    def at_once(
        inputs: Sequence[Tensor],
        tokens: Sequence[int],
        before: Sequence[State | None],
        goes_on: Sequence[bool],
    ) -> tuple[Tensor, Sequence[State | None]]:
        q, k, v, decay, rate = (x[None] for x in inputs)
        none = v.new_zeros(v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
        states = [none if state is None else state[0] for state in before]
        ends = torch.tensor([0, *accumulate(tokens)], device=v.device)
        out, after = theirs(
            *(q, k, v),
            g=decay,
            beta=rate,
            initial_state=torch.stack(states) if any(each is not None for each in before) else None,
            output_final_state=any(goes_on),
            cu_seqlens=ends,
            **options,
        )
        # Copies, lest a state that is left keeps those of all segments.
        left = [(after[n].clone(),) if wanted else None for n, wanted in enumerate(goes_on)]
        return out[0], left

    def compute(
        parts: list[Tensor], state: State | None, goes_on: bool
    ) -> tuple[Tensor, State | None]:
        q, k, v, decay, rate = (x[None] for x in parts)
        first = None if state is None else state[0][None]
        out, after = theirs(
            *(q, k, v),
            g=decay,
            beta=rate,
            initial_state=first,
            output_final_state=goes_on,
            **options,
        )
        return out[0], (after[0],) if goes_on else None

    way = at_once if takes_segments(value) else one_by_one(compute)
    out = by_segment(rows, (layer, "delta"), inputs, way)
    return join(to_own_rows(out, value.shape[1], rows, group)[None]), None


def _scan(
    theirs: Callable[..., Any],
    layer: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Tensor:
    """Mamba 2: hidden [1, rows, heads, width], dt [1, rows, heads], B, C [1, rows, groups, n]."""
    rows, group = _rows("a Mamba 2 scan")
    if not rows.tokens:
        return hidden_states * 0
    tensor = current_run().groups.tensor
    mine, join = _heads_of((hidden_states, dt, B, C), hidden_states.shape[2], group, tensor)
    inputs = to_all_rows([x[0] for x in mine], rows, group)
    by_head = {
        name: None if each is None else _own(_own(each, tensor), group)
        for name, each in {"A": A, "D": D, "dt_bias": dt_bias}.items()
    }

    def compute(
        parts: list[Tensor], state: State | None, goes_on: bool
    ) -> tuple[Tensor, State | None]:
        x, step, b, c = (each[None] for each in parts)
        out = theirs(
            x,
            step,
            B=b,
            C=c,
            chunk_size=chunk_size,
            initial_states=None if state is None else state[0],
            return_final_states=goes_on,
            **by_head,
            **options,
        )
        return (out[0][0], (out[1],)) if goes_on else (out[0], None)

    out = by_segment(rows, (layer, "scan"), inputs, one_by_one(compute))
    return join(to_own_rows(out, hidden_states.shape[1], rows, group)[None])


def _not_fused(*_: Any, **__: Any) -> None:
    """Nothing: the family then computes the convolution and the scan by themselves."""


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    CONVOLUTION: _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}
"""What takes the place of transformers' functions of these names."""
