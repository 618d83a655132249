"""How the ranks that share a stage hold its parameters: as FSDP2's shards, grouped into buckets.

``fully_shard`` cuts every parameter over data × context and records in a DTensor which part of
which global parameter a rank holds, on the tensor-parallel axis too. Checkpoints, the optimizer and
the norm of the gradients read that. :mod:`.gather_and_reduce` gathers and reduces in place of
FSDP2's own run time; docs/design.md has the reasons.

A *bucket* holds the parameters of a layer, or of an end of the model, which are gathered and whose
gradients are reduced in one collective. Its flat buffer is [ranks, elements]: for each parameter in
turn one chunk per rank, padded to equal size if the ranks do not divide the sharded dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_wlb.mesh import sharded_dim
from lightning_wlb.models.tensor_parallel import held


def shard_over(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace every parameter by this rank's shard of it; one that two modules share stays shared.

    Parameters are plain, or DTensors on the tensor axis, on any device; ``mesh`` has one axis.
    """
    # FSDP2 makes the given module gather by itself, so it gets this holder and not the model.
    holder = nn.Module()
    whole = list(model.parameters())
    for number, parameter in enumerate(whole):
        holder.register_parameter(str(number), parameter)
    fully_shard(
        holder,
        mesh=mesh,
        # FSDP2 requires equal shares of any dim except the first.
        shard_placement_fn=lambda each: Shard(sharded_dim(held(each).shape, mesh.size())),
    )
    shards = dict(zip(whole, holder.parameters(), strict=True))
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None:
                module._parameters[name] = shards[own]


@dataclass(frozen=True)
class ShardedParameter:
    """How the ranks share one parameter."""

    places: tuple[tuple[nn.Module, str], ...]  #: the modules that have it, and its name in each
    shape: tuple[int, ...]  #: of the whole parameter, or of this rank's tensor-parallel part of it
    dim: int  #: the dim that is cut
    rows: int  #: each rank's size of that dim; the last ranks may have fewer
    is_part: bool  #: whether the gradient is a part of a sum over the tensor-parallel ranks

    @staticmethod
    def of(parameter: DTensor, places: Sequence[tuple[nn.Module, str]]) -> ShardedParameter:
        """Read the layout from a parameter's placements."""
        over_ranks, *over_tensor = parameter.placements
        shape = list(parameter.shape)
        for place in over_tensor:
            if isinstance(place, Shard):
                shape[place.dim] //= parameter.device_mesh.size(1)
        dim, ranks = cast(Shard, over_ranks).dim, parameter.device_mesh.size(0)
        is_part = any(place.is_replicate() for place in over_tensor)
        return ShardedParameter(tuple(places), tuple(shape), dim, -(-shape[dim] // ranks), is_part)

    @property
    def shard(self) -> DTensor:
        """The shard of this rank; in a step the modules hold the whole parameter instead."""
        module, name = self.places[0]
        return cast(DTensor, module._parameters[name])

    @property
    def chunk(self) -> tuple[int, ...]:
        """The shape of a rank's shard, padded to ``rows``."""
        return (*self.shape[: self.dim], self.rows, *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered together, and whose gradients are reduced together."""

    modules: tuple[nn.Module, ...]  #: their forwards wait for the parameters
    stages: frozenset[int]  #: the pipeline stages whose actions use them
    parameters: tuple[ShardedParameter, ...]  #: in the order of the bucket's flat buffer

    @staticmethod
    def of(
        modules: Sequence[nn.Module], stages: Sequence[int], inside: Sequence[nn.Module]
    ) -> Bucket:
        """Make a bucket of the sharded parameters of ``inside``, but not of their children."""
        places: dict[DTensor, list[tuple[nn.Module, str]]] = {}
        for module in inside:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(cast(DTensor, parameter), []).append((module, name))
        held = tuple(ShardedParameter.of(parameter, at) for parameter, at in places.items())
        return Bucket(tuple(modules), frozenset(stages), held)


def chunks_of(gradient: Tensor, buffer: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cuts a whole gradient as its parameter is sharded along ``dim``.

    Yields:
        Views of the gradient, each with the place of ``buffer``, ``[ranks, *chunk]``, that it
        belongs in: the full chunks together, and the last one where it has fewer rows.
    """
    rows = buffer.shape[1 + dim]
    full, rest = divmod(gradient.shape[dim], rows)
    even = gradient.narrow(dim, 0, full * rows)
    yield even.unflatten(dim, (full, rows)).movedim(dim, 0), buffer[:full]
    if rest:
        yield gradient.narrow(dim, full * rows, rest), buffer[full].narrow(dim, 0, rest)


def set_gradient(shard: DTensor, value: Tensor) -> None:
    """Set ``.grad`` of a sharded parameter to ``value``, this rank's shard of it in any dtype."""
    shard.grad = DTensor.from_local(
        value.to(shard.dtype),
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )


def refuse_hooks(name: str, parameter: Tensor) -> None:
    """Raise ValueError for hooks on a sharded parameter, which no backward passes through."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"{name} has a hook (register_hook or register_post_accumulate_grad_hook) that would"
            " never run: a step sums gradients over micro-batches and ranks beside the parameter."
            " Change parameter.grad in a callback's on_before_optimizer_step."
        )
