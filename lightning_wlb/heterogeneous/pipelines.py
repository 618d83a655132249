"""A rank's place in the steps of one strategy: its pipeline, process groups, and its stage.

Where a step's pipelines differ from the mesh's, a rank holds the stage of its own scheme for that
step. This has what such steps have in common: the stage's modules, which have no values between
steps, and what waits for which parameters.

Pipelines that are alike may share micro-batches (DP-Merge): the context ranks at the same stage and
tensor place of all of them then exchange keys as one group.

Cost: process groups for each strategy, made and connected once in a process, collectively over all
ranks. Not run on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_wlb.distributed.device_mesh import set_timeout
from lightning_wlb.distributed.process_groups import (
    MergedGroups,
    ProcessGroups,
    connect_channels,
    kept,
    own_group,
)
from lightning_wlb.heterogeneous.planning.exchanges import Link
from lightning_wlb.mesh import Rank
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.plan import Scheme, Schemes, StepPlan, alike, rank_in
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Channel, Kind
from lightning_wlb.training.messages import PipelineRank
from lightning_wlb.training.parallelize import convert_tensors, keep_stages

_KINDS: tuple[Kind, Kind] = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class Settings:
    """What all steps of a run have in common.

    Args:
        build: makes the whole model, on the meta device.
        hidden_size: elements per row of a boundary tensor.
        schedule: name of the schedule.
        dtype: of the parameters in a step.
        wide: of the sums of gradients.
        device: of this rank.
        timeout: of process groups that are made; None: torch's default.
    """

    build: Callable[[], Decoder]
    hidden_size: int
    schedule: str
    dtype: torch.dtype
    wide: torch.dtype
    device: torch.device
    timeout: timedelta | None = None


@dataclass(frozen=True)
class _Pipeline(PipelineRank):
    """A pipeline on the ranks of its scheme."""

    scheme: Scheme

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global rank at each place of the pipeline."""
        return _chain(self.scheme, self.rank)


class OfStrategy:
    """What a rank needs for steps of one strategy: process groups, and its stage without values.

    Attributes:
        parts: the modules that wait for parameters, and the slots in which these come.
        places: name of a parameter in the whole model -> the modules that have it, its name there.
    """

    def __init__(self, link: Link, settings: Settings) -> None:
        self.link = link
        rank = rank_in(link.strategy, link.rank)
        scheme = link.strategy[rank.data]
        self._groups = _groups_of(link.strategy, link.rank, settings.device, settings.timeout)
        channels, given = self._groups.channels, (settings.hidden_size, settings.dtype)
        self.pipeline = _Pipeline(
            rank, scheme.layers, settings.schedule, channels, *given, settings.device, scheme
        )
        self.model = settings.build()
        keep_stages(self.model, list(scheme.layers), rank.pipeline, len(scheme.stages))
        # Parameters have no values yet, buffers do.
        convert_tensors(self.model, lambda each: each if each.is_meta else each.to(settings.device))
        self.parts: dict[nn.Module, set[int]] = {}
        self.places: dict[str, list[tuple[nn.Module, str]]] = {}
        slots = {
            name: slot
            for slot, unit in enumerate(link.units)
            for name in link.weights.units[unit].names
        }
        tied = self.model.tied
        for path, module in self.model.named_modules():
            for attribute in [
                name for name, each in module._parameters.items() if each is not None
            ]:
                name = tied.get(f"{path}.{attribute}", f"{path}.{attribute}")
                depth = 2 if name.startswith("layers.") else 1
                part = self.model.get_submodule(".".join(path.split(".")[:depth]))
                self.parts.setdefault(part, set()).add(slots[name])
                self.places.setdefault(name, []).append((module, attribute))

    def groups_of(self, plan: StepPlan) -> ProcessGroups:
        """What a model's forward communicates over in a step; collective over all ranks."""
        return replace(self._groups.of_pipeline, merged=self._groups.merged.prepare(plan))


@dataclass(frozen=True, eq=False)
class _Groups:
    """The process groups of one rank in the steps of a strategy.

    Args:
        channels: those of its pipeline's messages.
        of_pipeline: those of context and tensor parallelism.
        merged: over several pipelines.
    """

    channels: Mapping[Channel, ProcessGroup]
    of_pipeline: ProcessGroups
    merged: MergedGroups

    def set_timeout(self, timeout: timedelta) -> None:
        """Let any operation wait so long."""
        several = (self.of_pipeline.context, self.of_pipeline.tensor, *self.channels.values())
        set_timeout(timeout, *(group for group in several if group is not None))
        self.merged.set_timeout(timeout)


def _groups_of(
    strategy: Schemes, rank: int, device: torch.device, timeout: timedelta | None
) -> _Groups:
    """The process groups of a strategy, made and connected at the first call; collective."""

    def make() -> _Groups:
        stages, context, tensor = (
            [_along(strategy, axis) for _ in range(count)] for axis, count in enumerate((2, 1, 1))
        )
        made = [
            [own_group(sets, rank, timeout) if sets else None for sets in of_axis]
            for of_axis in (stages, context, tensor)
        ]
        channels = {
            Channel(kind, False): group
            for kind, group in zip(_KINDS, made[0], strict=True)
            if group is not None
        }
        # Messages between neighbours that cross must not be what connects them. In a collective
        # all ranks wait for each other anyway.
        place = rank_in(strategy, rank)
        chain = _chain(strategy[place.data], place)
        connect_channels(chain, rank, device, channels)
        kinds = [
            np.array([strategy[number].ranks for number in numbers]).reshape(-1, *sizes)
            for (layers, *among), numbers in alike(strategy).items()
            for sizes in [(len(layers), *among)]
        ]
        merged = MergedGroups(kinds, rank, timeout)
        return _Groups(channels, ProcessGroups(made[1][0], made[2][0]), merged)

    return kept((strategy, device.type), make, timeout)


def _chain(scheme: Scheme, place: Rank) -> tuple[int, ...]:
    """Global ranks of the stages at a rank's context and tensor place."""
    first = place.context * scheme.tensor + place.tensor
    return tuple(scheme.ranks[first :: scheme.context * scheme.tensor])


def _along(strategy: Schemes, axis: int) -> list[list[int]]:
    """Global ranks of the groups of all pipelines along stages, context or tensor; of several."""
    found: list[list[int]] = []
    for scheme in strategy:
        shape = len(scheme.stages), scheme.context, scheme.tensor
        if shape[axis] > 1:
            ranks = np.arange(scheme.size).reshape(shape) + scheme.first
            found += np.moveaxis(ranks, axis, -1).reshape(-1, shape[axis]).tolist()
    return found
