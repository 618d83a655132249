"""The gradient norm over all ranks of a data × pipeline × context × tensor mesh.

Within a stage the gradients are DTensors, whose norm torch computes over their own mesh; over the
pipeline axis squares are added. A tied weight has a copy on two stages and counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    pipeline_group: dist.ProcessGroup | None,
    counted_elsewhere: Collection[nn.Parameter] = (),
) -> Tensor:
    """Scale the gradients in place so that their global 2-norm is at most ``max_norm``.

    Args:
        parameters: this stage's parameters, gradients already reduced.
        max_norm: largest norm of all parameters of all stages together.
        pipeline_group: the ranks that hold the other stages; None for a single stage.
        counted_elsewhere: parameters whose gradient another stage counts. They are scaled too.

    Returns:
        The norm before clipping, 0-dim, the same on every rank.
    """
    owned = [parameter for parameter in parameters if parameter.grad is not None]
    skipped = {id(parameter) for parameter in counted_elsewhere}
    by_mesh: dict[object, list[Tensor]] = defaultdict(list)
    for parameter in owned:
        if id(parameter) not in skipped:
            gradient = parameter.grad
            assert gradient is not None
            by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(
                gradient
            )
    squares = None
    for gradients in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(gradients)
        square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).double() ** 2
        squares = square if squares is None else squares + square
    if squares is None:
        device = owned[0].device if owned else torch.device("cpu")
        squares = torch.zeros((), dtype=torch.float64, device=device)
    if pipeline_group is not None:
        dist.all_reduce(squares, group=pipeline_group)
    total = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(owned, max_norm, total)
    return total
