"""Tensor parallelism: sharded parameters are DTensors, and computation is on plain tensors.

Each parameter is a DTensor on the one-dimensional tensor axis, so that checkpoints, gradient norms
and FSDP2 know which part of which global parameter a rank holds. Within a step of ``WLBStrategy``
modules have plain tensors, the rank's shards; elsewhere :func:`local` returns them. The model moves
rows itself, by :func:`gather_rows` and :func:`scatter_rows` (sequence parallelism).

Each rank uses a replicated parameter for other rows or other heads, so its gradient is ``Partial``.
``WLBStrategy`` sums it when it reduces gradients; elsewhere ``parameter.grad.full_tensor()`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from lightning_wlb.distributed.collectives import all_gather, reduce_scatter
from lightning_wlb.distributed.process_groups import group_rank, group_size

_Move = Callable[[Tensor, ProcessGroup], Tensor]


def local(parameter: Tensor) -> Tensor:
    """A rank's shard of a parameter as a plain tensor; gradients flow back to the DTensor."""
    if not isinstance(parameter, DTensor):
        return parameter
    parts = [Partial() if each.is_replicate() else each for each in parameter.placements]
    return parameter.to_local(grad_placements=parts)


def assign(parameter: Tensor, full: Tensor) -> None:
    """Give a plain or sharded parameter its values; the rank keeps only its own part.

    ``full`` has all values, in the parameter's shape and any dtype, the same on every rank.
    """
    with torch.no_grad():
        held(parameter).copy_(full[share_of(parameter)])


def share_of(parameter: Tensor) -> tuple[slice, ...]:
    """The rectangle of the whole parameter that this rank holds as its :func:`held` tensor.

    It is one rectangle even if FSDP and tensor parallelism split the same dim, because FSDP cuts
    the part that tensor parallelism gives the rank.
    """
    sizes, first = tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        sizes, first = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    return tuple(slice(start, start + size) for start, size in zip(first, sizes, strict=True))


def held(parameter: Tensor) -> Tensor:
    """The rank's shard of a parameter, sharing its memory, outside of autograd."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gather_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Rows of all ranks of a group, one rank after another: [group size · rows, ...].

    ``x`` is [rows, ...], equally shaped on every rank, and is returned as it is without a group or
    for one rank. Backward gives each rank its rows' gradients, summed in :func:`.reduce_dtype`.
    """
    # Row counts are equal, so all ranks agree on whether there is anything to send.
    if group_size(group) == 1 or x.shape[0] == 0:
        return x
    return _move_rows(x, group, all_gather, reduce_scatter)


def scatter_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of the ranks' [group size · rows, ...]; each rank gets its own rows, [rows, ...].

    The sum is in :func:`.reduce_dtype`. Backward gathers the gradient's rows.

    Raises:
        ValueError: the rows do not divide by the group's size.
    """
    size = group_size(group)
    if size == 1 or x.shape[0] == 0:
        return x
    if x.shape[0] % size:
        raise ValueError(
            f"{x.shape[0]} rows cannot be scattered over {size} ranks; the sharding pads rows to a"
            " multiple of the tensor-parallel size."
        )
    return _move_rows(x, group, reduce_scatter, all_gather)


def embed_words(
    lookup: Callable[[Tensor], Tensor], tokens: Tensor, words: int, group: ProcessGroup | None
) -> Tensor:
    """An embedding whose words are split over ranks, ``words`` on each, in rank order.

    The result is this rank's rows of the hidden states, [rows / group size, dim].

    Args:
        lookup: int64 [rows], numbers among this rank's words -> [rows, dim].
        tokens: int64 [rows], the same on every rank.
    """
    if group_size(group) == 1:
        return lookup(tokens)
    column = tokens - group_rank(group) * words
    elsewhere = (column < 0) | (column >= words)
    rows = lookup(column.masked_fill(elsewhere, 0))
    return scatter_rows(rows.masked_fill(elsewhere[:, None], 0), group)


def shard_parameters(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Placement]) -> None:
    """Replace every parameter of ``model`` with a DTensor on ``mesh``, in place.

    Parameters with values must be the same on every rank: each keeps its part, and nothing is sent.
    Parameters on the meta device stay there. A parameter that two modules share stays shared.

    Args:
        mesh: the tensor axis, one-dimensional.
        plan: see :meth:`.Decoder.tensor_parallel_plan`; the first pattern that fits a name counts.

    Raises:
        ValueError: a parameter that no pattern names (its gradient would be wrong although the loss
            is right), or whose sharded dimension does not divide by the size of ``mesh``.
    """
    replaced: dict[Tensor, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        placement = placement_of(name, plan)
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
            raise ValueError(
                f"tensor parallelism: dimension {placement.dim} of parameter {name!r}, of shape"
                f" {tuple(parameter.shape)}, does not divide by tensor_parallel_size={mesh.size()}."
                " Choose a size that divides it, or Replicate() in tensor_parallel_plan()."
            )
        # src_data_rank=None: each rank cuts its own copy, nothing is sent.
        shard = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        replaced[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for attribute, own in module._parameters.items():
            if own is not None:
                module._parameters[attribute] = replaced[own]


def placement_of(name: str, plan: Mapping[str, Placement]) -> Placement:
    """How a tensor-parallel plan places a parameter; raises ValueError if no pattern names it."""
    for pattern, placement in plan.items():
        if fnmatchcase(name, pattern):
            return placement
    raise ValueError(
        f"tensor parallelism: no pattern of the plan names parameter {name!r}. The patterns are"
        f" {', '.join(plan)}. Add one to your model's tensor_parallel_plan(): Shard(0) or Shard(1)"
        " for matrices that are split, Replicate() for norms. A parameter left out would get a"
        " wrong gradient although the loss is right."
    )


class _MoveRows(torch.autograd.Function):
    """One of two collectives that are each other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, move: _Move, move_back: _Move) -> Tensor:
        ctx.group, ctx.move_back = group, move_back
        return move(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.move_back(gradient, ctx.group), None, None, None


_move_rows: Callable[..., Tensor] = _MoveRows.apply
