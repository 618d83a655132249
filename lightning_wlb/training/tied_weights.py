"""Tied embeddings whose two ends are on different pipeline stages: each adds the other's gradient.

Both stages hold a copy of the same weight, sharded alike over data × context and tensor ranks, and
each computes part of its gradient. The two exchange their shards and add, and identical optimizers
then keep the copies identical. Without the exchange the gradient is wrong by most of its size, and
the copies drift apart.

Cost: one exchange of the tied weight's shard per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_wlb.distributed.process_groups import message_device


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
        assert group is not None
        sent = gradient.contiguous().to(message_device(gradient.device, group))
        other = torch.empty_like(sent)
        exchange = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, peer, group),
                dist.P2POp(dist.irecv, other, peer, group),
            ]
        )
        for work in exchange:
            work.wait()
        gradient.add_(other.to(gradient.device))
