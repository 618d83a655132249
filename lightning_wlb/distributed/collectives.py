"""All-gather and reduce-scatter of rows, and the dtypes in which values are summed.

Autograd knows nothing of these collectives: their callers pair each with its backward.

A rank sums its own values in :func:`sum_dtype`. Sums over ranks are in :func:`reduce_dtype`, which
is the same unless a step asks for bfloat16, which halves the bytes and rounds every sum of two
ranks' values to 8 bits of mantissa. NCCL and gloo both sum bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed both; the old names warn there, the new ones do not exist before.
all_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[rows, ...] of every rank of a group, one rank after another: [group size · rows, ...]."""
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    all_gather_into(out, x.contiguous(), group=group)
    return out


def reduce_scatter(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[group size · rows, ...] of every rank, summed in :func:`reduce_dtype`: own [rows, ...]."""
    wide = x.to(reduce_dtype(x.dtype)).contiguous()
    out = wide.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    reduce_scatter_into(out, wide, group=group)
    return out.to(x.dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed: float32 for half types, else itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# Global to the process, not a context variable: autograd runs backward in threads of its own.
_least = torch.float32


@contextmanager
def reducing_in(dtype: torch.dtype) -> Iterator[None]:
    """A context in which sums over ranks are in at least ``dtype``: float32, or bfloat16."""
    global _least
    before, _least = _least, dtype
    try:
        yield
    finally:
        _least = before


def reduce_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed over ranks; never narrower."""
    return torch.promote_types(dtype, _least)


def padded(x: Tensor, rows: int) -> Tensor:
    """[queries, heads, head_dim] with zero rows appended, [rows, heads, head_dim]."""
    padding = rows - x.shape[0]
    return F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x
