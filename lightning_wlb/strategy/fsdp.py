"""Parameters at rest: FSDP2's shards, over data × context.

``fully_shard`` cuts every parameter and says as a DTensor which part of which global parameter a
rank holds, on the tensor-parallel axis too: what checkpoints, the optimizer and the norm of the
gradients read. FSDP2's own run time is left out: it reduces inside of a backward, which a rank
without micro-batches does not have, and on backends without streams it waits there. What a step
does with the shards is in :mod:`.gathering`.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace every parameter by this rank's shard of it; one that two modules share stays shared.

    Args:
        model: its parameters are plain, or DTensors on the tensor axis, on any device.
        mesh: the one-axis mesh to shard over.
    """
    # FSDP2 changes the module that it is given, and lets it gather by itself: so not the model.
    holder = nn.Module()
    whole = list(model.parameters())
    for number, parameter in enumerate(whole):
        holder.register_parameter(str(number), parameter)
    fully_shard(
        holder,
        mesh=mesh,
        shard_placement_fn=lambda parameter: _split_dim(parameter, mesh.size()),
    )
    shards = dict(zip(whole, holder.parameters(), strict=True))
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None:
                module._parameters[name] = shards[own]


def _split_dim(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Which dim of a parameter to shard, where the first is too short; None for the first.

    With two rows, as of a packed projection or a low-rank adapter, two ranks would hold all of it.
    FSDP wants equal shares of any dim but the first.
    """
    shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
    if not shape or shape[0] >= ranks:
        return None
    even = [dim for dim, size in enumerate(shape) if size % ranks == 0 and size]
    return Shard(even[0]) if even else None
