"""What is done to gradients over the pipeline after FSDP's reduction: tied weights, then the norm.

* Tied embeddings whose two ends are on different pipeline stages: both stages hold a copy of the
  same weight, sharded alike over data × context and tensor ranks, and each computes part of its
  gradient. The two exchange their shards and add, and identical optimizers then keep the copies
  identical. Without the exchange the gradient is wrong by most of its size, and the copies drift
  apart.
* Clipping by the global norm: within a stage the gradients are DTensors, whose norm torch computes
  over their own mesh; over the pipeline axis squares are added. A tied weight has a copy on two
  stages and counts once.

Cost: one exchange of the tied weight's shard; one all-reduce of a number over the pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Tie:
    """One weight under two names of the model: in its embedding and in its head."""

    embedding: str
    head: str


def find_ties(model: nn.Module) -> list[Tie]:
    """Weights that the model's embedding and head share, by name in the model."""
    names: dict[int, str] = {
        id(parameter): f"embed.{name}"
        for name, parameter in cast(nn.Module, model.embed).named_parameters()
    }
    head = cast(nn.Module, model.head)
    return [
        Tie(names[id(parameter)], f"head.{name}")
        for name, parameter in head.named_parameters()
        if id(parameter) in names
    ]


def add_tied_gradients(
    model: nn.Module, ties: list[Tie], peer: int | None, group: dist.ProcessGroup | None
) -> None:
    """Add the other stage's gradient shard to this stage's, for every tied weight.

    Args:
        model: the stage's model, gradients already reduced.
        ties: from :func:`find_ties`, before the model was split.
        peer: global rank of the same shard on the other end; None on stages without a tied end
            and where both ends are on one stage.
        group: a process group that holds both ranks.
    """
    if peer is None:
        return
    parameters = dict(model.named_parameters())
    for tie in ties:
        mine = parameters[tie.embedding if tie.embedding in parameters else tie.head]
        if not mine.requires_grad:
            continue
        assert mine.grad is not None, "the final reduction gives every parameter a gradient"
        gradient = mine.grad.to_local() if isinstance(mine.grad, DTensor) else mine.grad
        other = torch.empty_like(gradient)
        exchange = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, gradient.contiguous(), peer, group),
                dist.P2POp(dist.irecv, other, peer, group),
            ]
        )
        for work in exchange:
            work.wait()
        gradient.add_(other)


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
    elsewhere = {id(parameter) for parameter in counted_elsewhere}
    by_mesh: dict[object, list[Tensor]] = defaultdict(list)
    for parameter in owned:
        gradient = parameter.grad
        if gradient is not None and id(parameter) not in elsewhere:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh[mesh].append(gradient)
    device = owned[0].device if owned else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradients in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(gradients)
        squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm).double() ** 2
    if pipeline_group is not None:
        dist.all_reduce(squares, group=pipeline_group)
    total = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(owned, max_norm, total)
    return total
