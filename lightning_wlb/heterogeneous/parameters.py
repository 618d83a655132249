"""The parameters of a step on heterogeneous pipelines, and the sums of their gradients.

The counterpart of :mod:`~lightning_wlb.training.gather_and_reduce` for steps whose pipelines differ
from the mesh's; both stand on the hooks of :mod:`~lightning_wlb.training.parameter_hooks`. Every
pull is posted before the first action, and a module waits for its own parameters when it is called.
Gradients of micro-batches are summed beside the parameters. During the last backward a bucket is
pushed as soon as its gradients are complete and all later turns have been pushed. So every rank
posts all pulls before its first push.

If pipelines share the micro-batch of that backward, all pushes are posted after it. A pipeline that
still has micro-batches of its own joins a push only behind those; on a device that runs one
operation after the other, the attention that both share would wait behind the push, and never end.

Frozen parameters are pulled and never pushed. A shard gets the sum over all pipelines and context
ranks, and over tensor-parallel ranks where these hold the parameter alike; each copy of a tied
weight gets the whole sum.

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

from lightning_wlb.heterogeneous.parameter_transfer import Pull, Push
from lightning_wlb.heterogeneous.pipelines import HeterogeneousStage, StageSettings
from lightning_wlb.heterogeneous.running_exchange import ExchangeGroups
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.schedule.actions import BACKWARD, Action
from lightning_wlb.training.parameter_hooks import (
    before_forward,
    gradient_too_late,
    module_not_called,
    take_gradients,
)
from lightning_wlb.training.sharded_parameters import refuse_hooks, set_gradient


class ExchangedParameters:
    """The :class:`.StepParameters` of a rank in steps on some heterogeneous pipelines.

    ``model`` is this rank's part of the model on the mesh, with its shards.
    """

    def __init__(
        self,
        stage: HeterogeneousStage,
        model: Decoder,
        groups: ExchangeGroups,
        settings: StageSettings,
    ) -> None:
        self._stage, self._groups, self._settings = stage, groups, settings
        tied = model.tied
        self._sharded = [
            (model.get_submodule(path), attribute, tied.get(name, name))
            for name, _ in model.named_parameters()
            for path, _, attribute in [name.rpartition(".")]
        ]
        self._live: _StageInStep | None = None
        self._last: Action | None = None
        self._shared: Collection[int] = ()
        self._push: Push | None = None

    @contextmanager
    def step(self, program: Sequence[Action], shared: Collection[int] = ()) -> Iterator[None]:
        """Pull the step's parameters, and at its end push the gradients that are left.

        Arguments are those of :meth:`.StepParameters.step`.
        """
        settings = self._settings
        sharded = dict(self._shards())
        self._check(sharded)
        shards = {name: parameter.to_local().detach() for name, parameter in sharded.items()}
        given = settings.dtype, settings.device
        with torch.no_grad():
            pull = Pull(self._stage.redistribution, self._groups, shards, *given)
        backwards = [action for action in program if action.kind == BACKWARD]
        self._last, self._shared = backwards[-1] if backwards else None, shared
        self._live = live = _StageInStep(self._stage, pull, self._groups, settings)
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
            self._live.expect_last_gradients(held=action.micro_batch in self._shared)
        yield

    def wait(self) -> None:
        """Wait for all parameters."""
        assert self._live is not None
        self._live.wait_for_all()

    def finish(self) -> None:
        """Wait for the gradients, and set ``.grad`` of the sharded parameters."""
        assert self._push is not None, "a step has ended"
        with torch.no_grad():
            totals, self._push = self._push.finish(), None
            for name, shard in self._shards():
                if name in self._stage.redistribution.weights.frozen:
                    continue
                total = totals.get(name)
                if total is None:  # a rank may have no row of a parameter
                    total = torch.zeros_like(shard.to_local())
                set_gradient(shard, total)

    def _check(self, sharded: Mapping[str, DTensor]) -> None:
        """Refuse parameters that were frozen or unfrozen since the run began, or have hooks."""
        frozen = self._stage.redistribution.weights.frozen
        changed = [n for n, each in sharded.items() if each.requires_grad == (n in frozen)]
        if changed:
            raise ValueError(
                f"frozen or unfrozen since the run began: {', '.join(changed[:4])}. What steps on"
                " pipelines of their own exchange was fixed then. Freeze before the run, or use"
                " dynamic='off'."
            )
        for name, each in sharded.items():
            if name not in frozen:
                refuse_hooks(name, each)

    def _shards(self) -> Iterator[tuple[str, DTensor]]:
        for module, attribute, name in self._sharded:
            yield name, cast(DTensor, module._parameters[attribute])


class _StageInStep:
    """The parameters of one step in the modules of a stage, and the sums of their gradients."""

    def __init__(
        self,
        stage: HeterogeneousStage,
        pull: Pull,
        groups: ExchangeGroups,
        settings: StageSettings,
    ) -> None:
        self._stage, self._pull, self._groups, self._settings = stage, pull, groups, settings
        self._own = stage.redistribution
        self._empty = {
            place: cast(nn.Parameter, place[0]._parameters[place[1]])
            for places in stage.places.values()
            for place in places
        }
        self._sums: dict[str, Tensor] = {}
        self._added: set[str] = set()  # of the sums; others are not filled
        self._names: dict[int, set[str]] = {}  # by turn, trained ones of those that have arrived
        self._awaited: dict[int, set[str]] = {}
        self._push: Push | None = None
        self._training = torch.is_grad_enabled()
        self._hooks = [
            before_forward(module, partial(self._wait_for, turns), settings.dtype)
            for module, turns in stage.waiting.items()
        ]

    def wait_for_all(self) -> None:
        """Wait for all parameters of the stage."""
        self._wait_for(range(len(self._own.buckets)))

    def _wait_for(self, turns: Collection[int]) -> None:
        for turn in sorted(turns):
            if turn not in self._names:
                self._arrive(turn)

    def _arrive(self, turn: int) -> None:
        self._names[turn] = set()
        with torch.no_grad():
            for name, value in self._pull.arrive(turn).items():
                trained = name not in self._own.weights.frozen
                live = nn.Parameter(value, trained)
                for module, attribute in self._stage.places[name]:
                    module._parameters[attribute] = live
                if trained and self._training:
                    self._names[turn].add(name)
                    take_gradients(live, partial(self._add, turn, name))

    def _add(self, turn: int, name: str, gradient: Tensor) -> None:
        if self._push is not None and turn > self._push.next:
            raise gradient_too_late(name)
        self._make_sum(name)
        if name in self._added:
            self._sums[name] += gradient
        else:
            self._sums[name].copy_(gradient)
            self._added.add(name)
        if self._push is not None:
            self._awaited[turn].discard(name)
            self._post_complete()

    def _make_sum(self, name: str) -> None:
        if name not in self._sums:
            module, attribute = self._stage.places[name][0]
            live = cast(nn.Parameter, module._parameters[attribute])
            self._sums[name] = torch.empty_like(live, dtype=self._settings.sum_dtype)

    def expect_last_gradients(self, *, held: bool) -> None:
        """Begin the last backward of the step, in which each parameter gets its last gradient.

        ``held``: whether gradients may be pushed only when that backward is over.

        Raises:
            ValueError: if no forward has waited for some parameters.
        """
        missing = [turn for turn in range(len(self._own.buckets)) if turn not in self._names]
        if missing:
            buckets = [self._own.weights.buckets[self._own.buckets[turn]] for turn in missing]
            raise module_not_called(name for bucket in buckets for name in bucket.names)
        if not held:
            self._begin_push()

    def finish(self) -> Push | None:
        """Push what is left: all turns, of zeros, where the rank had no micro-batch."""
        self.wait_for_all()
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
        given = self._settings.sum_dtype, self._settings.device
        self._awaited = {turn: set(names) for turn, names in self._names.items()}
        for name in (name for names in self._names.values() for name in names):
            self._make_sum(name)
        self._push = Push(self._own, self._groups, self._sums, *given)

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
