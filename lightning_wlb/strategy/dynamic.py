"""Steps on pipelines of their own, which differ from the mesh's and from each other.

Parameters and optimizer state stay where the mesh has them. A step's plan says its strategy; every
rank then holds, for that step, the stage of its pipeline's scheme: parameters are pulled from where
they rest, gradients pushed back (:mod:`.travel`). Actions, messages and the model's forward are
those of any other step (:class:`~lightning_wlb.strategy.executor.Step`).

All parameters are posted before the first action, and a module waits for its own when it is called.
Gradients of micro-batches add up beside the parameters, in the wide dtype; in the last backward a
slot is posted as soon as the gradients of its unit are complete, and slots after it have been. So
the collectives of the two directions never cross: no rank posts a push before it has posted every
pull. What a rank gets are sums over all pipelines, over context ranks and, for what tensor-parallel
ranks hold alike, over these.

Cost: process groups, and modules without values, for each strategy; a step holds its stage whole
in both dtypes. Nothing is measured here, and no micro-batch is shared between pipelines. For steps
on the mesh's own pipelines :class:`~lightning_wlb.strategy.executor.Executor` is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_wlb.attention.process_groups import ProcessGroups
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.links.layout import Strategy
from lightning_wlb.links.link import Link, Links
from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.plan import Scheme, StepPlan
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Channel
from lightning_wlb.schedule.receipts import receipts
from lightning_wlb.strategy.executor import Step
from lightning_wlb.strategy.messages import Messages, Pipeline
from lightning_wlb.strategy.parallelize import keep_stages
from lightning_wlb.strategy.process_groups import own_group
from lightning_wlb.strategy.travel import Groups, Pull, Push


def rank_in(strategy: Strategy, number: int) -> Rank:
    """Where a global rank stands in its pipeline: on a mesh of as many replicas as pipelines.

    Only :attr:`.Rank.data` and the places in the pipeline mean anything, since the pipelines of a
    mesh would all be alike. It is what the data of a step are made for.
    """
    at, scheme = next((at, each) for at, each in enumerate(strategy) if number in each.ranks)
    mesh = Mesh(len(strategy), len(scheme.stages), scheme.context, scheme.tensor)
    return Rank(mesh, at, *scheme.place(number))


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

    Raises:
        ValueError: a dtype to which arguments of modules would have to be cast.
    """

    build: Callable[[], Decoder]
    hidden_size: int
    schedule: str
    dtype: torch.dtype
    wide: torch.dtype
    device: torch.device
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"steps on pipelines of their own compute in float32 or float64, not {self.dtype}."
            )


class DynamicExecutor:
    """Runs steps of any strategy on one rank.

    Args:
        model: this rank's share of the model at rest.
        links: to any strategy, of this rank.
        groups: for the exchanges of links (:func:`.travel_groups`).
        settings: of the run.
    """

    def __init__(self, model: Decoder, links: Links, groups: Groups, settings: Settings) -> None:
        self._links, self._groups, self._settings = links, groups, settings
        tied = model.tied
        self._rest: list[tuple[str, DTensor]] = [
            (tied.get(name, name), cast(DTensor, parameter))
            for name, parameter in model.named_parameters(remove_duplicate=True)
        ]
        self._made: dict[Strategy, _OfStrategy] = {}
        self._push: Push | None = None

    def run(self, batch: StepBatch, denominator: int) -> Tensor:
        """One step, forwards and backwards; collective over all ranks.

        Args:
            batch: this rank's part of a plan with a strategy, made for :func:`rank_in` it.
            denominator: what the summed loss of all ranks is divided by, in tokens.

        Returns:
            The step's loss, 0-dim, the same on every rank.

        Raises:
            ValueError: the strategy is the mesh's, micro-batches are shared, or a stage does not
                call a module that it holds.
        """
        here, settings = self._pipelines(batch.plan), self._settings
        shards = {name: each.to_local().detach() for name, each in self._rest}
        with torch.no_grad():
            pull = Pull(here.link, self._groups, shards, settings.dtype, settings.device)
        live = _Live(here, pull, self._groups, settings)
        pipeline = here.pipeline
        programs = pipeline.programs(batch.executed, batch.replica)
        place, places = pipeline.rank.pipeline, pipeline.rank.mesh.pipeline
        messages = Messages(pipeline, receipts(programs, place, places, places))
        step = Step(here.model, pipeline, here.groups, batch, messages, denominator, None, None)
        last = max((at for at, a in enumerate(programs[place]) if a.kind == BACKWARD), default=-1)
        try:
            for at, action in enumerate(programs[place]):
                if at == last:
                    live.awaits_last()
                step.run(action)
            messages.finish()
            self._push = live.finish()
        finally:
            live.leave()
        return self._total(step.loss, pipeline.rank) / denominator

    def finish(self) -> None:
        """Wait for the step's gradients and set ``.grad`` of the parameters at rest."""
        assert self._push is not None, "a step has run"
        with torch.no_grad():
            totals = self._push.finish()
            for name, rest in self._rest:
                if not rest.requires_grad:
                    continue
                # A rank may have no row of a parameter.
                sums = totals.get(name, torch.zeros_like(rest.to_local()))
                rest.grad = DTensor.from_local(
                    sums.to(rest.dtype),
                    rest.device_mesh,
                    rest.placements,
                    run_check=False,
                    shape=rest.shape,
                    stride=rest.stride(),
                )
        self._push = None

    def _pipelines(self, plan: StepPlan) -> _OfStrategy:
        link = self._links.to(plan.strategy) if plan.strategy else None
        if link is None:
            raise ValueError(
                f"step {plan.step} runs on the pipelines of the mesh: give it to an Executor."
            )
        if any(len(each.replicas) > 1 for replica in plan.replicas for each in replica.forward):
            raise ValueError(
                f"step {plan.step}: pipelines of a strategy cannot share micro-batches. Plan"
                " without DP-Merge."
            )
        if plan.strategy not in self._made:
            self._made[plan.strategy] = _OfStrategy(link, self._settings)
        return self._made[plan.strategy]

    def _total(self, loss: Tensor, rank: Rank) -> Tensor:
        # Tensor-parallel ranks all have the same loss.
        total = loss if rank.last_stage and rank.tensor == 0 else torch.zeros_like(loss)
        dist.all_reduce(total)
        return total


@dataclass(frozen=True)
class _Pipeline(Pipeline):
    """A pipeline on the ranks of its scheme."""

    scheme: Scheme

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global rank at each place of the pipeline."""
        apart = self.scheme.context * self.scheme.tensor
        place = self.rank.context * self.scheme.tensor + self.rank.tensor
        return tuple(self.scheme.ranks[place::apart])


class _OfStrategy:
    """What a rank needs for steps of one strategy: process groups, and its stage without values.

    Attributes:
        parts: the modules that wait for parameters, and the slots in which these come.
        places: name of a parameter in the whole model -> the modules that have it, its name there.
    """

    def __init__(self, link: Link, settings: Settings) -> None:
        self.link = link
        rank = rank_in(link.strategy, link.rank)
        scheme = link.strategy[rank.data]
        stages, context, tensor = (
            [_along(link.strategy, axis) for _ in range(count)]
            for axis, count in enumerate((2, 1, 1))
        )
        made = [
            [own_group(sets, link.rank, settings.timeout) if sets else None for sets in of_axis]
            for of_axis in (stages, context, tensor)
        ]
        channels = {
            Channel(kind, False): group
            for kind, group in zip((FORWARD, BACKWARD), made[0], strict=True)
            if group is not None
        }
        self.groups = ProcessGroups(made[1][0], made[2][0])
        given = settings.hidden_size, settings.dtype, settings.device
        self.pipeline = _Pipeline(rank, scheme.layers, settings.schedule, channels, *given, scheme)
        self.model = settings.build()
        keep_stages(self.model, list(scheme.layers), rank.pipeline, len(scheme.stages))
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


def _along(strategy: Strategy, axis: int) -> list[list[int]]:
    """Global ranks of the groups of all pipelines along stages, context or tensor; of several."""
    found: list[list[int]] = []
    for scheme in strategy:
        shape = len(scheme.stages), scheme.context, scheme.tensor
        if shape[axis] > 1:
            ranks = np.arange(scheme.size).reshape(shape) + scheme.first
            found += np.moveaxis(ranks, axis, -1).reshape(-1, shape[axis]).tolist()
    return found


class _Live:
    """The parameters of one step in the modules of a stage, and the sums of their gradients."""

    def __init__(self, here: _OfStrategy, pull: Pull, groups: Groups, settings: Settings) -> None:
        self._here, self._pull, self._groups, self._settings = here, pull, groups, settings
        self._empty = {
            place: cast(nn.Parameter, place[0]._parameters[place[1]])
            for places in here.places.values()
            for place in places
        }
        self._sums: dict[str, Tensor] = {}
        self._names: dict[int, set[str]] = {}  # by slot, of those that have arrived
        self._awaited: dict[int, set[str]] = {}
        self._push: Push | None = None
        self._hooks = [
            module.register_forward_pre_hook(partial(self._before_forward, slots), prepend=True)
            for module, slots in here.parts.items()
        ]

    def _before_forward(self, slots: Collection[int], module: nn.Module, args: Any) -> None:
        for slot in sorted(slots):
            self._arrive(slot)

    def _arrive(self, slot: int) -> None:
        if slot in self._names:
            return
        self._names[slot] = set()
        with torch.no_grad():
            for name, value in self._pull.arrive(slot).items():
                places = self._here.places[name]
                live = nn.Parameter(value, self._empty[places[0]].requires_grad)
                for module, attribute in places:
                    module._parameters[attribute] = live
                self._sums[name] = torch.zeros_like(value, dtype=self._settings.wide)
                if live.requires_grad:
                    self._names[slot].add(name)
                    live.register_post_accumulate_grad_hook(partial(self._add, slot, name))

    def _add(self, slot: int, name: str, live: Tensor) -> None:
        gradient, live.grad = live.grad, None
        assert gradient is not None
        self._sums[name] += gradient
        if self._push is not None:
            self._awaited[slot].discard(name)
            self._post_complete()

    def awaits_last(self) -> None:
        """The last backward of the step is next: each parameter's gradient is added once more.

        Raises:
            ValueError: if no forward has waited for some parameters.
        """
        missing = set(range(len(self._here.link.units))) - set(self._names)
        if missing:
            units = [self._here.link.weights.units[self._here.link.units[n]] for n in missing]
            raise ValueError(
                "A stage ran without calling a module that it holds, so parameters were not waited"
                f" for and would not be trained: {', '.join(n for u in units for n in u.names)}."
                " Call embed, head and every layer in the model's forward, as modules."
            )
        self._begin_push()

    def finish(self) -> Push:
        """Post what is left: all slots, of zeros, where the rank had no micro-batch."""
        if self._push is None:
            for slot in range(len(self._here.link.units)):
                self._arrive(slot)
        push = self._push or self._begin_push()
        self._pull.finish()
        self._awaited.clear()
        self._post_complete()
        return push

    def leave(self) -> None:
        """Take the parameters out of the modules."""
        for (module, attribute), empty in self._empty.items():
            module._parameters[attribute] = empty
        for hook in self._hooks:
            hook.remove()

    def _begin_push(self) -> Push:
        settings = self._settings
        self._awaited = {slot: set(names) for slot, names in self._names.items()}
        self._push = Push(self._here.link, self._groups, self._sums, settings.wide, settings.device)
        return self._push

    def _post_complete(self) -> None:
        push = self._push
        assert push is not None
        while push.next >= 0 and not self._awaited.get(push.next):
            push.post()
