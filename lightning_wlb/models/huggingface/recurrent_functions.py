"""Run transformers' functions for recurrent layers on each piece separately.

Each function here replaces the function that transformers has under its name in :data:`FUNCTIONS`.
It gets that function, the layer's number and the function's arguments, and calls it for each piece
with the state that the previous slice has left (:mod:`lightning_wlb.attention.recurrence`). Ranks
that share rows compute their own heads of all rows; so do tensor-parallel ranks.

Cost: a call of the recurrence for each piece of a micro-batch, and one call of a convolution. With
flash-linear-attention, a delta rule on CUDA takes all pieces in one call (``cu_seqlens``), which
has been run only with a stand-in. Kernels that fuse convolution and recurrence are not called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers.utils import is_flash_linear_attention_available

from lightning_wlb.attention.recurrence import (
    Compute,
    Computed,
    RecurrentRows,
    SegmentRows,
    by_segment,
    one_by_one,
    to_all_rows,
    to_own_rows,
)
from lightning_wlb.distributed.process_groups import group_size
from lightning_wlb.models.huggingface.attention import RUNNING
from lightning_wlb.models.tensor_parallel import gather_rows

CONVOLUTION = "causal_conv1d_fn"
"""The name of every family's convolution."""


class _Heads(NamedTuple):
    """Which heads (of a convolution: channels) of the running micro-batch this rank computes."""

    total: int  #: heads of all ranks
    rows: RecurrentRows  #: where the micro-batch's pieces lie
    group: ProcessGroup | None  #: the ranks that share the micro-batch's rows
    tensor: ProcessGroup | None  #: the tensor-parallel ranks, if they share the heads too

    def own(self, x: Tensor, dim: int = 0) -> Tensor:
        """The part of values by head that belongs to this rank."""
        return _part(_part(x, self.tensor, dim), self.group, dim)

    def run(self, key: Any, inputs: Sequence[Tensor], compute: Compute) -> Tensor:
        """Compute a recurrence on all rows of this rank's heads.

        Args:
            key: distinguishes the recurrence from others of the model.
            inputs: [own rows, heads, ...] each. The first has the result's heads. In others a group
                of heads may share an entry, which is repeated if ranks cannot get whole groups.
            compute: the recurrence on [rows of all ranks, own heads, ...].

        Returns:
            [own rows, heads, ...].
        """
        if not self.rows.tokens:
            return inputs[0] * 0
        ranks = group_size(self.group) * group_size(self.tensor)
        mine = [
            x.repeat_interleave(self.total // x.shape[1], 1) if x.shape[1] % ranks else x
            for x in inputs
        ]
        whole = to_all_rows([_part(x, self.tensor, 1) for x in mine], self.rows, self.group)
        out = by_segment(self.rows, key, whole, compute)
        out = to_own_rows(out, len(inputs[0]), self.rows, self.group)
        if group_size(self.tensor) == 1:
            return out
        return gather_rows(out.transpose(0, 1).contiguous(), self.tensor).transpose(0, 1)


def _part(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    return x if group_size(group) == 1 else x.chunk(group_size(group), dim)[dist.get_rank(group)]


def _heads(name: str, count: int, *, tensor: bool = True) -> _Heads:
    """The heads of this rank; with ``tensor`` they are split over tensor-parallel ranks too."""
    run = RUNNING.get()
    rows = run.micro_batch.recurrence
    if rows is None:
        raise ValueError(
            f"{name}: the batch does not say where its documents begin. Make it with"
            " make_step_batch(..., recurrent=True), as WLBDataModule does for such a model."
        )
    groups = run.groups.of_rows(rows.replicas), run.groups.tensor if tensor else None
    assert count % prod(map(group_size, groups)) == 0, "the mesh and all plans divide them"
    return _Heads(count, rows, *groups)


def takes_segments(x: Tensor) -> bool:
    """Whether the family calls kernels that take all segments at once (flash-linear-attention)."""
    return x.is_cuda and is_flash_linear_attention_available()


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
    # Every tensor-parallel rank has whole convolutions.
    heads = _heads(CONVOLUTION, hidden_states.shape[1], tensor=False)
    front = weight.shape[-1] - 1
    mine, mine_bias = heads.own(weight), None if bias is None else heads.own(bias)

    def compute(given: SegmentRows) -> Computed:
        # One call: before each segment come its preceding rows, whose own results are dropped.
        (x,) = given.inputs
        none = x.new_zeros(front, *x.shape[1:])
        joined = [
            torch.cat([none if state is None else state[0], own])
            for state, own in zip(given.before, x.split(given.tokens), strict=True)
        ]
        channels = torch.cat(joined)[..., 0].t()[None]
        out = theirs(channels, mine, mine_bias, activation=activation)[0].t()[..., None]
        kept = [each[front:] for each in out.split([len(each) for each in joined])]
        ends = [
            (each[len(each) - front :].clone(),) if wanted else None
            for each, wanted in zip(joined, given.goes_on, strict=True)
        ]
        return torch.cat(kept), ends

    out = heads.run((layer, CONVOLUTION), [hidden_states[0].t()[..., None]], compute)
    return out[..., 0].t()[None]


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
    at_once = takes_segments(value)

    def compute(given: SegmentRows) -> Computed:
        v, q, k, decay, rate = (x[None] for x in given.inputs)
        first, more = None, {}
        if any(each is not None for each in given.before):
            none = v.new_zeros(v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
            first = torch.stack([none if state is None else state[0] for state in given.before])
        if at_once:
            more["cu_seqlens"] = torch.tensor([0, *accumulate(given.tokens)], device=v.device)
        out, after = theirs(
            *(q, k, v),
            g=decay,
            beta=rate,
            initial_state=first,
            output_final_state=any(given.goes_on),
            **more,
            **options,
        )
        # Copies, so that a kept state does not hold the memory of all segments' states.
        left = [(after[n].clone(),) if wanted else None for n, wanted in enumerate(given.goes_on)]
        return out[0], left

    every = [x[0] for x in (value, query, key, g, beta)]
    heads = _heads("the gated delta rule", value.shape[2])
    out = heads.run((layer, "delta"), every, compute if at_once else one_by_one(compute))
    return out[None], None


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
    heads = _heads("a Mamba 2 scan", hidden_states.shape[2])
    by_head = {
        name: None if each is None else heads.own(each)
        for name, each in {"A": A, "D": D, "dt_bias": dt_bias}.items()
    }

    def compute(given: SegmentRows) -> Computed:
        x, step, b, c = (each[None] for each in given.inputs)
        (state,), (wanted,) = given.before, given.goes_on
        out = theirs(
            x,
            step,
            B=b,
            C=c,
            chunk_size=chunk_size,
            initial_states=None if state is None else state[0],
            return_final_states=wanted,
            **by_head,
            **options,
        )
        # A copy, since the state is a view of the scan's states of all chunks.
        return (out[0][0], [(out[1].clone(),)]) if wanted else (out[0], [None])

    every = [x[0] for x in (hidden_states, dt, B, C)]
    return heads.run((layer, "scan"), every, one_by_one(compute))[None]


def _not_fused(*_: Any, **__: Any) -> None:
    """Return None, so that the family computes convolution and scan separately."""


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    CONVOLUTION: _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}
"""The functions that replace transformers' functions of these names."""
