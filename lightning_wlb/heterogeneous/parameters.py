"""The parameters of a step on pipelines of its own, and the sums of their gradients.

The counterpart of :mod:`~lightning_wlb.training.parameter_buckets`, for steps whose pipelines
differ from
the mesh's. All parameters are posted before the first action, and a module waits for its own when
it is called. Gradients of micro-batches add up beside the parameters, in the wide dtype; in the
last backward a slot is posted as soon as the gradients of its unit are complete and the slots after
it have been posted. No rank posts a push before it has posted every pull, so the two cannot cross.
Where that backward is of a micro-batch that pipelines share, all slots are posted after it: another
of these may have micro-batches of its own left, and would join the push only behind them, while
this one's attention stood behind the push on a device that runs one after the other.

Frozen parameters come, and nothing of them goes back. What comes to rest are sums over all
pipelines, over context ranks and, of what tensor-parallel ranks hold alike, over these; and each
copy of a tied weight gets the whole sum.

Cost: a step holds its stage whole in both dtypes, sums from a first gradient to their push.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_wlb.heterogeneous.pipelines import OfStrategy, Settings
from lightning_wlb.heterogeneous.transfer import Groups, Pull, Push
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.schedule.actions import BACKWARD, Action
from lightning_wlb.training.parameter_hooks import (
    before_forward,
    gradient_too_late,
    module_not_called,
    take_gradients,
)
from lightning_wlb.training.sharded_parameters import refuse_hooks, set_gradient


class Linked:
    """The steps of one strategy's parameters: the counterpart of a ``ParameterBuckets``."""

    def __init__(self, own: OfStrategy, model: Decoder, groups: Groups, settings: Settings) -> None:
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
        self._shared: Collection[int] = ()
        self._push: Push | None = None

    @contextmanager
    def step(self, program: Sequence[Action], shared: Collection[int] = ()) -> Iterator[None]:
        """Post the step's parameters, and at its end what is left of its gradients.

        Args:
            program: the actions of this rank; without backward where gradients are disabled.
            shared: numbers of the micro-batches that other pipelines share.
        """
        settings = self._settings
        at_rest = dict(self._at_rest())
        self._check(at_rest)
        shards = {name: parameter.to_local().detach() for name, parameter in at_rest.items()}
        with torch.no_grad():
            pull = Pull(self._own.link, self._groups, shards, settings.dtype, settings.device)
        backwards = [action for action in program if action.kind == BACKWARD]
        self._last, self._shared = backwards[-1] if backwards else None, shared
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
            self._live.awaits_last(held=action.micro_batch in self._shared)
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
                if name in self._own.link.weights.frozen:
                    continue
                total = totals.get(name)
                if total is None:  # a rank may have no row of a parameter
                    total = torch.zeros_like(rest.to_local())
                set_gradient(rest, total)

    def _check(self, at_rest: Mapping[str, DTensor]) -> None:
        """Refuse parameters that were frozen or unfrozen since the run began, or have hooks."""
        frozen = self._own.link.weights.frozen
        changed = [n for n, each in at_rest.items() if each.requires_grad == (n in frozen)]
        if changed:
            raise ValueError(
                f"frozen or unfrozen since the run began: {', '.join(changed[:4])}. What travels to"
                " steps on pipelines of their own was fixed then. Freeze before the run, or use"
                " dynamic='off'."
            )
        for name, each in at_rest.items():
            if name not in frozen:
                refuse_hooks(name, each)

    def _at_rest(self) -> Iterator[tuple[str, DTensor]]:
        for module, attribute, name in self._rest:
            yield name, cast(DTensor, module._parameters[attribute])


class _Live:
    """The parameters of one step in the modules of a stage, and the sums of their gradients."""

    def __init__(self, here: OfStrategy, pull: Pull, groups: Groups, settings: Settings) -> None:
        self._here, self._pull, self._groups, self._settings = here, pull, groups, settings
        self._empty = {
            place: cast(nn.Parameter, place[0]._parameters[place[1]])
            for places in here.places.values()
            for place in places
        }
        self._sums: dict[str, Tensor] = {}
        self._added: set[str] = set()  # of the sums; others are not filled
        self._names: dict[int, set[str]] = {}  # by slot, trained ones of those that have arrived
        self._awaited: dict[int, set[str]] = {}
        self._push: Push | None = None
        self._training = torch.is_grad_enabled()
        self._hooks = [
            before_forward(module, partial(self._wait_for, slots), settings.dtype)
            for module, slots in here.parts.items()
        ]

    def arrive_all(self) -> None:
        """Wait for all parameters of the stage."""
        for slot in range(len(self._here.link.units)):
            self._arrive(slot)

    def _wait_for(self, slots: Collection[int]) -> None:
        for slot in sorted(slots):
            self._arrive(slot)

    def _arrive(self, slot: int) -> None:
        if slot in self._names:
            return
        self._names[slot] = set()
        with torch.no_grad():
            for name, value in self._pull.arrive(slot).items():
                places = self._here.places[name]
                trained = name not in self._here.link.weights.frozen
                live = nn.Parameter(value, trained)
                for module, attribute in places:
                    module._parameters[attribute] = live
                if trained and self._training:
                    self._names[slot].add(name)
                    take_gradients(live, partial(self._add, slot, name))

    def _add(self, slot: int, name: str, gradient: Tensor) -> None:
        if self._push is not None and slot > self._push.next:
            raise gradient_too_late(name)
        self._make_sum(name)
        if name in self._added:
            self._sums[name] += gradient
        else:
            self._sums[name].copy_(gradient)
            self._added.add(name)
        if self._push is not None:
            self._awaited[slot].discard(name)
            self._post_complete()

    def _make_sum(self, name: str) -> None:
        if name not in self._sums:
            module, attribute = self._here.places[name][0]
            live = cast(nn.Parameter, module._parameters[attribute])
            self._sums[name] = torch.empty_like(live, dtype=self._settings.wide)

    def awaits_last(self, *, held: bool) -> None:
        """The last backward of the step is next: each parameter's gradient is added once more.

        Args:
            held: whether gradients may be posted only when it is over.

        Raises:
            ValueError: if no forward has waited for some parameters.
        """
        missing = set(range(len(self._here.link.units))) - set(self._names)
        if missing:
            units = [self._here.link.weights.units[self._here.link.units[n]] for n in missing]
            raise module_not_called(name for unit in units for name in unit.names)
        if not held:
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
        for name in (name for names in self._names.values() for name in names):
            self._make_sum(name)
        self._push = Push(self._here.link, self._groups, self._sums, settings.wide, settings.device)

    def _post_complete(self) -> None:
        push = self._push
        assert push is not None
        while push.next >= 0 and not self._awaited.get(push.next):
            names = self._names.get(push.next, set())
            for name in names - self._added:
                self._sums[name].zero_()
            push.post()
            for name in names:
                del self._sums[name]
