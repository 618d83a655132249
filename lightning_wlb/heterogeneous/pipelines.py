"""A rank's stage and process groups in steps on heterogeneous pipelines.

For such a step a rank holds the stage of its own scheme. All steps on the same pipelines share a
:class:`HeterogeneousStage`: the stage's modules, whose parameters have no values between steps, and
the parameters that each module waits for.

Pipelines of equal shape may share micro-batches (DP-Merge): their context ranks at the same stage
and tensor place then exchange keys as one group.

Cost: process groups for each choice of pipelines, connected once by all ranks. Not run on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lightning_wlb.distributed.process_groups import (
    MergedGroups,
    ProcessGroups,
    connect_channels,
    kept,
    own_group,
)
from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.mesh import Rank
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.plan import Scheme, Schemes, StepPlan, alike, rank_in
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Channel
from lightning_wlb.training.parallelize import convert_tensors, keep_stages
from lightning_wlb.training.pipeline_messages import PipelineRank


def exchange_group(rank: int, ranks: int, device: torch.device) -> ProcessGroup:
    """The group of all ranks over which parameters and their gradients are exchanged.

    Nothing else is sent over it. It is made at the first call, which is collective and connects all
    ranks: else NCCL would connect two ranks in the first uneven all-to-all in which one sends to
    the other, and block each until the other arrives, perhaps a rank that the step waits for.
    """

    def make() -> ProcessGroup:
        group = own_group([range(ranks)], rank)
        assert group is not None, "every rank is in it"
        sent, each = torch.zeros(ranks, device=device), [1] * ranks
        dist.all_to_all_single(torch.empty_like(sent), sent, each, each, group=group)
        return group

    return kept(("exchanges", device.type), make)


class HeterogeneousStage:
    """A rank's stage, without values, and its process groups, for steps on some pipelines.

    ``build`` makes the whole model, on the meta device.

    Attributes:
        waiting: each module that waits for parameters -> the turns in which these arrive.
        places: name of a parameter in the whole model -> modules that hold it, and its name there.
    """

    def __init__(
        self, redistribution: Redistribution, build: Callable[[], Decoder], pipeline: PipelineRank
    ) -> None:
        self.redistribution = redistribution
        schemes, number = redistribution.schemes, redistribution.rank
        rank = rank_in(schemes, number)
        scheme, device = schemes[rank.data], pipeline.device
        channels, self._of_pipeline, self._merged = _groups_of(schemes, number, device)
        self.pipeline = replace(
            pipeline, rank=rank, stages=scheme.layers, groups=channels, ranks=_chain(scheme, rank)
        )
        self.model = build()
        keep_stages(self.model, list(scheme.layers), rank.pipeline, len(scheme.stages))
        # Parameters have no values yet, buffers do.
        convert_tensors(self.model, lambda each: each if each.is_meta else each.to(device))
        self.waiting: dict[nn.Module, set[int]] = {}
        self.places: dict[str, list[tuple[nn.Module, str]]] = {}
        turns = {
            name: turn
            for turn, bucket in enumerate(redistribution.buckets)
            for name in redistribution.weights.buckets[bucket].names
        }
        tied = self.model.tied
        for path, module in self.model.named_modules():
            own = [name for name, each in module._parameters.items() if each is not None]
            for attribute in own:
                name = tied.get(f"{path}.{attribute}", f"{path}.{attribute}")
                depth = 2 if name.startswith("layers.") else 1
                part = self.model.get_submodule(".".join(path.split(".")[:depth]))
                self.waiting.setdefault(part, set()).add(turns[name])
                self.places.setdefault(name, []).append((module, attribute))

    def groups_of(self, plan: StepPlan) -> ProcessGroups:
        """The process groups of a model's forward in a step; collective over all ranks."""
        return replace(self._of_pipeline, merged=self._merged.prepare(plan))


def _groups_of(
    schemes: Schemes, rank: int, device: torch.device
) -> tuple[Mapping[Channel, ProcessGroup], ProcessGroups, MergedGroups]:
    """The process groups of some pipelines, made and connected at the first call; collective."""

    def make() -> tuple[Mapping[Channel, ProcessGroup], ProcessGroups, MergedGroups]:
        # All ranks make groups in this order: two for messages, one each for context and tensor.
        forward, backward, context, tensor = (
            own_group(sets, rank) if (sets := _along(schemes, axis)) else None
            for axis in ("pipeline", "pipeline", "context", "tensor")
        )
        channels = {
            Channel(kind, False): group
            for kind, group in ((FORWARD, forward), (BACKWARD, backward))
            if group is not None
        }
        # Crossing messages between neighbours must not open their connection. Here, in a
        # collective, all ranks wait for each other anyway.
        place = rank_in(schemes, rank)
        connect_channels(_chain(schemes[place.data], place), rank, device, channels)
        kinds = [
            np.array([schemes[number].ranks for number in numbers]).reshape(-1, len(layers), *among)
            for (layers, *among), numbers in alike(schemes).items()
        ]
        return channels, ProcessGroups(context, tensor), MergedGroups(kinds, rank)

    return kept((schemes, device.type), make)


def _chain(scheme: Scheme, place: Rank) -> tuple[int, ...]:
    """Global ranks of the stages at a rank's context and tensor place."""
    first = place.context * scheme.tensor + place.tensor
    return tuple(scheme.ranks[first :: scheme.context * scheme.tensor])


def _along(schemes: Schemes, axis: str) -> list[list[int]]:
    """Global ranks of all groups of several ranks along an axis of the pipelines."""
    groups = [(scheme.first + scheme.mesh().groups(axis)).tolist() for scheme in schemes]
    return [group for of_scheme in groups for group in of_scheme if len(group) > 1]
