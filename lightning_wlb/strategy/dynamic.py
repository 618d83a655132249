"""Steps on pipelines of their own, which differ from the mesh's and from each other.

Parameters and optimizer state stay where the mesh has them. A step's plan says its strategy; every
rank then holds, for that step, the stage of its pipeline's scheme: parameters are pulled from where
they rest, gradients pushed back (:mod:`.travel`). All else of a step is the
:class:`~lightning_wlb.strategy.executor.Executor`'s, to which :class:`Elsewhere` says what it runs
on.

All parameters are posted before the first action, and a module waits for its own when it is called.
Gradients of micro-batches add up beside the parameters, in the wide dtype; in the last backward a
slot is posted as soon as the gradients of its unit are complete and the slots after it have been
posted. No rank posts a push before it has posted every pull, so the two cannot cross. What comes to
rest are sums over all pipelines, over context ranks and, of what tensor-parallel ranks hold alike,
over these; and each copy of a tied weight gets the whole sum.

Cost: process groups, and modules without values, for each strategy; a step holds its stage whole
in both dtypes. No micro-batch is shared between pipelines. For steps on the mesh's own pipelines
:class:`~lightning_wlb.strategy.gathering.Gathering` holds less, and copies less. Not run on CUDA,
where a new strategy's groups would have to be connected before its first step
(:mod:`~lightning_wlb.strategy.process_groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_wlb.attention.process_groups import ProcessGroups
from lightning_wlb.links.layout import Strategy, rank_in
from lightning_wlb.links.link import Link, Links
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.plan import Scheme, StepPlan
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action, Channel, Kind
from lightning_wlb.strategy.executor import Surroundings
from lightning_wlb.strategy.gathering import cast_floats
from lightning_wlb.strategy.messages import Pipeline
from lightning_wlb.strategy.parallelize import keep_stages
from lightning_wlb.strategy.process_groups import own_group
from lightning_wlb.strategy.travel import Groups, Pull, Push

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


class Elsewhere:
    """What the steps of any strategy run on, of one rank: for ``Executor.elsewhere``.

    Args:
        model: this rank's share of the model at rest.
        links: to any strategy, of this rank.
        groups: for the exchanges of links (:func:`.travel_groups`).
        settings: of the run.
    """

    def __init__(self, model: Decoder, links: Links, groups: Groups, settings: Settings) -> None:
        self._links, self._groups, self._settings = links, groups, settings
        self._model = model
        self._made: dict[Strategy, Surroundings] = {}

    def __call__(self, plan: StepPlan) -> Surroundings:
        """What this plan's steps run on; collective over all ranks where its strategy is new.

        Raises:
            ValueError: the strategy is the mesh's, or micro-batches are shared.
        """
        link = self._links.to(plan.strategy)
        if link is None:
            raise ValueError(
                f"step {plan.step} has the strategy of the mesh. Plan it without a strategy."
            )
        if any(len(each.replicas) > 1 for replica in plan.replicas for each in replica.forward):
            raise ValueError(
                f"step {plan.step}: pipelines of a strategy cannot share micro-batches. Plan"
                " without DP-Merge."
            )
        if plan.strategy not in self._made:
            own = _OfStrategy(link, self._settings)
            linked = _Linked(own, self._model, self._groups, self._settings)
            self._made[plan.strategy] = Surroundings(own.model, own.pipeline, own.groups, linked)
        return self._made[plan.strategy]


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
            for kind, group in zip(_KINDS, made[0], strict=True)
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


class _Linked:
    """The steps of one strategy's parameters: the counterpart of a ``Gathering``."""

    def __init__(
        self, own: _OfStrategy, model: Decoder, groups: Groups, settings: Settings
    ) -> None:
        self._own, self._groups, self._settings = own, groups, settings
        tied = model.tied
        self._rest = [
            (module, attribute, tied.get(name, name))
            for name, _ in model.named_parameters()
            for path, _, attribute in [name.rpartition(".")]
            for module in [model.get_submodule(path)]
        ]
        self._live: _Live | None = None
        self._last: Action | None = None
        self._push: Push | None = None

    @contextmanager
    def step(self, program: Sequence[Action], shared: Collection[int] = ()) -> Iterator[None]:
        """Post the step's parameters, and at its end what is left of its gradients."""
        settings = self._settings
        shards = {name: parameter.to_local().detach() for name, parameter in self._at_rest()}
        with torch.no_grad():
            pull = Pull(self._own.link, self._groups, shards, settings.dtype, settings.device)
        backwards = [action for action in program if action.kind == BACKWARD]
        self._last = backwards[-1] if backwards else None
        self._live = live = _Live(self._own, pull, self._groups, settings)
        try:
            yield
            self._push = live.finish()
        finally:
            live.leave()
            self._live = None

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Run one action inside."""
        assert self._live is not None
        if action == self._last:
            self._live.awaits_last()
        yield

    def wait(self) -> None:
        """Wait for all parameters."""
        assert self._live is not None
        self._live.arrive_all()

    def finish(self) -> None:
        """Wait for the gradients, and set ``.grad`` of the parameters at rest."""
        assert self._push is not None, "a step has ended"
        with torch.no_grad():
            totals, self._push = self._push.finish(), None
            for name, rest in self._at_rest():
                if not rest.requires_grad:
                    continue
                # A rank may have no row of a parameter.
                total = totals.get(name, torch.zeros_like(rest.to_local()))
                rest.grad = DTensor.from_local(
                    total.to(rest.dtype),
                    rest.device_mesh,
                    rest.placements,
                    run_check=False,
                    shape=rest.shape,
                    stride=rest.stride(),
                )

    def _at_rest(self) -> Iterator[tuple[str, DTensor]]:
        for module, attribute, name in self._rest:
            yield name, cast(DTensor, module._parameters[attribute])


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
        self._training = torch.is_grad_enabled()
        self._hooks = [
            # Before a module's own hooks, which may read its parameters.
            module.register_forward_pre_hook(
                partial(self._before_forward, slots), prepend=True, with_kwargs=True
            )
            for module, slots in here.parts.items()
        ]

    def arrive_all(self) -> None:
        """Wait for all parameters of the stage."""
        for slot in range(len(self._here.link.units)):
            self._arrive(slot)

    def _before_forward(
        self, slots: Collection[int], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        for slot in sorted(slots):
            self._arrive(slot)
        dtype = self._settings.dtype
        if dtype == torch.bfloat16:
            return cast_floats(args, dtype), cast_floats(kwargs, dtype)
        return None

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

    def finish(self) -> Push | None:
        """Post what is left: all slots, of zeros, where the rank had no micro-batch."""
        self.arrive_all()
        self._pull.finish()
        if not self._training:
            return None
        if self._push is None:
            self._begin_push()
        self._awaited.clear()
        self._post_complete()
        return self._push

    def leave(self) -> None:
        """Take the parameters out of the modules."""
        for (module, attribute), empty in self._empty.items():
            module._parameters[attribute] = empty
        for hook in self._hooks:
            hook.remove()

    def _begin_push(self) -> None:
        settings = self._settings
        self._awaited = {slot: set(names) for slot, names in self._names.items()}
        self._push = Push(self._here.link, self._groups, self._sums, settings.wide, settings.device)

    def _post_complete(self) -> None:
        push = self._push
        assert push is not None
        while push.next >= 0 and not self._awaited.get(push.next):
            push.post()
