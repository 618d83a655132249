"""Parameters at rest: FSDP2's shards, over data × context.

``fully_shard`` cuts every parameter and says as a DTensor which part of which global parameter a
rank holds, on the tensor-parallel axis too: what checkpoints, the optimizer and the norm of the
gradients read. FSDP2's own run time is left out: it reduces inside of a backward, which a rank
without micro-batches does not have, and on backends without streams it waits there. What a step
does with the shards is in :mod:`.gathering`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_wlb.distributed.sharded_dim import sharded_dim


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
        # FSDP wants equal shares of any dim but the first.
        shard_placement_fn=lambda each: Shard(sharded_dim(_local_shape(each), mesh.size())),
    )
    shards = dict(zip(whole, holder.parameters(), strict=True))
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None:
                module._parameters[name] = shards[own]


def _local_shape(parameter: nn.Parameter) -> torch.Size:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
