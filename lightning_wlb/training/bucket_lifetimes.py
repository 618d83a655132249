"""A step's parameters in a model's modules, and the sums of their gradients.

Between steps a module holds shards. In a step its parameters are gathered in *buckets* (a layer, an
end), a forward hook lets each module wait for its own before it runs, and every gradient moves to
the bucket's sums as soon as it is made, so that ``.grad`` of a gathered parameter stays None. The
subclasses define how parameters are gathered and sums are reduced: :mod:`.gather_and_reduce` on the
mesh, ``heterogeneous/parameters.py`` on other pipelines. In both

* every bucket's gather is posted, in the order of first use; a forward waits for the buckets of the
  module that it enters, and for no other;
* each backward adds its gradients to the bucket's sums, in the dtype of reduction;
* when the last backward of the step has passed through a bucket, its parameters are freed and its
  reduction is posted, so that it runs while the backward goes on.

All ranks that exchange parameters post the same operations in the same order, whatever
micro-batches they have: gathers by first use, reductions from the last bucket to the first, each as
soon as those before it have been posted. A rank without micro-batches posts zeros. Replicas that
share a micro-batch wait for each other in its attention too, so that a rank reduces nothing before
the last such micro-batch is over (docs/design.md, "Parameters", says why nothing deadlocks).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_wlb.schedule.actions import BACKWARD, Action

Holders = Sequence[tuple[nn.Module, str]]
"""The modules that have a parameter, and its name in each."""


class StepParameters(ABC):
    """Gathers a step's parameters and reduces their gradients.

    Args:
        waiting: module whose forward waits for parameters -> their buckets' numbers, by first use.
        sum_dtype: dtype in which gradients are summed and reduced.
    """

    def __init__(
        self,
        waiting: Mapping[nn.Module, Collection[int]],
        dtype: torch.dtype,
        sum_dtype: torch.dtype,
    ) -> None:
        self.dtype, self.sum_dtype = dtype, sum_dtype
        self._in_step: list[BucketInStep] = []
        self._to_reduce: list[BucketInStep] = []  # the next one last
        self._closed_by: dict[Action, list[BucketInStep]] = {}
        self._held_by: Action | None = None  # the action that reductions wait for
        for module, numbers in waiting.items():
            _before_forward(module, partial(self._wait_for, sorted(numbers)), dtype)

    @abstractmethod
    def _gather(self, *, training: bool) -> Iterator[BucketInStep]:
        """Post the gathers of a step; yields its buckets, in the order of first use."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the reductions of the step and set ``.grad`` of the sharded parameters."""

    @contextmanager
    def step(self, program: Sequence[Action], shared: Collection[int] = ()) -> Iterator[None]:
        """Post the gathers of a step, and at its end the reductions that are left.

        The actions of ``program`` are run inside; if gradients are disabled, without backwards.
        ``shared`` has the numbers of the micro-batches that other replicas share.
        """
        training = torch.is_grad_enabled()
        self._forget()  # left by a step that was not finished
        try:
            with torch.no_grad():
                for bucket in self._gather(training=training):
                    self._in_step.append(bucket)
            if training:
                self._to_reduce = list(self._in_step)
                self._closed_by = self._last_backwards(program)
                merged = [a for a in program if a.kind == BACKWARD and a.micro_batch in shared]
                self._held_by = merged[-1] if merged else None
            yield
            for each in self._in_step:
                each.close()
            self.advance()
        except BaseException:
            # An exception may be followed by a save, which reads the shards.
            for each in self._in_step:
                each.free()
            self._forget()
            raise
        if not training:
            self._forget()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Run one action inside; then reduce the buckets whose last backward it is."""
        closing = self._closed_by.get(action, [])
        for each in closing:
            each.expect_last_gradients()
        yield
        for each in closing:
            each.close()
        if action == self._held_by:
            self._held_by = None
        self.advance()

    def advance(self) -> None:
        """Post the reductions whose turn has come."""
        while self._held_by is None and self._to_reduce and self._to_reduce[-1].closed:
            self._to_reduce.pop().reduce()

    def _wait_for(self, numbers: Sequence[int]) -> None:
        if not self._in_step:
            raise RuntimeError(
                "The model was called outside of a step, where a rank has only its shards of the"
                " parameters. Call self.step(batch), in validation and prediction too."
            )
        for number in numbers:
            self._in_step[number].refuse_if_closed()
            self._in_step[number].wait()

    def _last_backwards(self, program: Sequence[Action]) -> dict[Action, list[BucketInStep]]:
        """Map each backward to the buckets whose last backward it is."""
        last = {each.stage: at for at, each in enumerate(program) if each.kind == BACKWARD}
        closed_by: dict[Action, list[BucketInStep]] = {}
        for each in self._in_step:
            places = [last[stage] for stage in each.stages if stage in last]
            if places:
                closed_by.setdefault(program[max(places)], []).append(each)
        return closed_by

    def _forget(self) -> None:
        self._in_step, self._to_reduce, self._closed_by = [], [], {}
        self._held_by = None


class BucketInStep(ABC):
    """One bucket in one step.

    Args:
        parameters: the places of each; ``trained`` numbers those with gradients to reduce.
        stages: the pipeline stages whose actions use them.
        names: names of the bucket's modules, for errors.

    Attributes:
        closed: whether its gradients of the step are complete.
    """

    def __init__(
        self,
        run: StepParameters,
        parameters: Sequence[Holders],
        trained: Sequence[int],
        stages: Collection[int],
        names: Sequence[str],
    ) -> None:
        self.stages, self.closed = stages, False
        self._run, self._parameters, self._trained, self._names = run, parameters, trained, names
        self._between = [module._parameters[name] for (module, name), *_ in parameters]
        self._live: list[nn.Parameter] = []
        self._added: set[int] = set()  # numbers of the parameters whose sums have a gradient
        self._awaited: set[int] | None = None

    @abstractmethod
    def _values(self) -> Sequence[Tensor]:
        """Wait for the gather; the values of the parameters."""

    @abstractmethod
    def _drop_gather(self) -> None:
        """Wait for the end of the gather, and free its memory."""

    @abstractmethod
    def _add_to_sums(self, number: int, gradient: Tensor) -> None:
        """Add a gradient to the parameter's sums, or begin them with it."""

    @abstractmethod
    def reduce(self) -> None:
        """Post the reduction; without a backward it reduces zeros."""

    def wait(self) -> None:
        """Wait for the parameters, and put them into the modules."""
        if self._live or self.closed:
            return
        with torch.no_grad():
            values = self._values()
            for places, between, value in zip(self._parameters, self._between, values, strict=True):
                assert between is not None
                live = nn.Parameter(value, between.requires_grad)
                self._live.append(live)
                _put(places, live)
        for number in self._trained:
            self._live[number].register_post_accumulate_grad_hook(partial(self._take, number))

    def _take(self, number: int, parameter: Tensor) -> None:
        """Take a gradient as soon as a backward has made it, and add it to the sums."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self.refuse_if_closed()
        self._add_to_sums(number, gradient)
        self._added.add(number)
        if self._awaited is not None:
            self._awaited.discard(number)
            if not self._awaited:
                self.close()
                self._run.advance()

    def expect_last_gradients(self) -> None:
        """Begin the last backward of the step, in which each parameter gets its last gradient.

        Raises:
            ValueError: if no forward has waited for the parameters.
        """
        if len(self._live) < len(self._parameters):
            raise ValueError(
                f"A stage ran without calling a module that it holds ({', '.join(self._names)}), so"
                " parameters were not waited for and would not be trained. Call embed, head and"
                " every layer in the model's forward, as modules: self.layers[number](hidden, ...)."
            )
        # Frozen parameters get no gradient, and a recomputation may read them to the action's end.
        self._awaited = set(range(len(self._parameters)))
        if not self._awaited:
            self.close()

    def refuse_if_closed(self) -> None:
        """Raise RuntimeError if the bucket's last gradient of the step has been taken."""
        if self.closed:
            raise RuntimeError(
                f"{', '.join(self._names)} runs, or gets a gradient, after its gradients of the"
                " step were complete. A checkpoint of your model's own with use_reentrant=True does"
                " that: use False. Between a step and its optimizer the model cannot be called."
            )

    def close(self) -> None:
        """Free the parameters, which the step no longer uses; a second call does nothing."""
        if not self.closed:
            self._drop_gather()
            self.free()
            self.closed = True

    def free(self) -> None:
        """Put back into the modules what they had before the step."""
        for places, between in zip(self._parameters, self._between, strict=True):
            _put(places, between)
        self._live = []


def _put(places: Holders, parameter: nn.Parameter | None) -> None:
    for module, name in places:
        module._parameters[name] = parameter


def _before_forward(module: nn.Module, wait: Any, dtype: torch.dtype) -> None:
    """Call ``wait`` before each forward of a module, and cast its inputs if ``dtype`` is bfloat16.

    It runs before the module's own hooks, which may read its parameters.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        wait()
        return tree_map_only(Tensor, cast, (args, kwargs)) if dtype == torch.bfloat16 else None

    module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
