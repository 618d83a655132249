"""A step's parameters and gradients: gathered ahead of use, reduced behind the last backward.

At rest a rank holds a shard of each parameter of its stages (:mod:`.fsdp`). A *unit*
(:mod:`.units`) travels as a whole: a layer, an end, or what else the model has. In a step

* all units are posted to be gathered, in the order in which the stages use them first; a forward
  waits for the unit that it enters, and for no other;
* each backward adds its gradients to the sums of the unit, in the dtype of reduction;
* when the last backward of the step has passed through a unit, its parameters are freed and its
  sums are posted to be reduced, so that they travel while the backward goes on.

Every rank that shares a stage posts the same operations in the same order, whatever micro-batches
it has: gathers by first use, reductions from the last unit to the first, each as soon as those
before it have been posted. A rank without micro-batches posts zeros. So no two ranks can wait for
each other here, and the sums do not depend on who is first: a step gives the same bits again.
Replicas that share a micro-batch wait for each other in it too. So a rank reduces nothing before
its last one is over, or two of them could have each the other's reduction in front of its attention
on a device that runs one after the other.

Reduction is a plain sum: the loss is divided by the *global* number of target tokens. A parameter
that tensor-parallel ranks hold alike is summed over them at the end.

Cost: within a step this is ZeRO-1. From its first forward to its last backward a unit is held
whole, 6 bytes per parameter in bf16. Not for models whose stages do not fit that way; use more
pipeline or tensor parallelism. One more copy of a unit is made when it is gathered, and of its
gradients where a backend reduces in place. On one rank with one dtype nothing is copied or sent.

The group belongs to this traffic alone: NCCL runs it on a stream of its own, gloo in threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_wlb.distributed.collectives import all_gather_into, reduce_scatter_into
from lightning_wlb.schedule.actions import BACKWARD, Action
from lightning_wlb.training.buckets import Share, Unit, parts_of, refuse_hooks


class Travelling(Protocol):
    """What brings a step its parameters and takes its gradients away: as :class:`.Gathering`."""

    def step(
        self, program: Sequence[Action], shared: Collection[int] = ()
    ) -> AbstractContextManager[None]:
        """Run a step inside."""

    def action(self, action: Action) -> AbstractContextManager[None]:
        """Run one of its actions inside."""

    def wait(self) -> None:
        """Wait for all parameters."""

    def finish(self) -> None:
        """Wait for the gradients, and set ``.grad`` of the parameters at rest."""


class Gathering:
    """The steps of one rank's parameters.

    Args:
        units: all parameters, in the order of first use, at rest.
        group: ranks that share the parameters; used for nothing else.
        tensor_group: the tensor-parallel ranks; None for one.
        dtype: that the model computes in.
        wide: that gradients are summed in.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        wide: torch.dtype,
    ) -> None:
        self.group, self.tensor_group = group, tensor_group
        self.dtype, self.wide = dtype, wide
        self._units = units
        self._open: list[_InStep] = []
        self._queue: list[_InStep] = []  # to be reduced, the next one last
        self._closing: dict[Action, list[_InStep]] = {}
        self._held_by: Action | None = None  # behind which reductions may be posted
        self._zeros: Tensor | None = None
        for number, unit in enumerate(units):
            for module in unit.modules:
                hook = partial(self._before_forward, number)
                # Before a module's own hooks, which may read its parameters.
                module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    @contextmanager
    def step(self, program: Sequence[Action], shared: Collection[int] = ()) -> Iterator[None]:
        """Post the gathers of a step, and at its end what is left to reduce.

        Args:
            program: the actions of this rank; without backward where gradients are disabled.
            shared: numbers of the micro-batches that other replicas share.
        """
        training = torch.is_grad_enabled()
        self._forget()  # what a step has left whose gradients nobody wanted
        try:
            with torch.no_grad():
                for unit in self._units:
                    self._open.append(_InStep(unit, self, training))
            if training:
                self._queue = list(self._open)
                self._closing = self._last_backwards(program)
                merged = [a for a in program if a.kind == BACKWARD and a.micro_batch in shared]
                self._held_by = merged[-1] if merged else None
            yield
            for each in self._open:
                each.close()
            self.advance()
        except BaseException:
            # An exception may be followed by a save, which reads what is at rest.
            for each in self._open:
                each.free()
            self._forget()
            raise
        if not training:
            self._forget()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Run one action inside; units of which it is the last backward are reduced."""
        closing = self._closing.get(action, [])
        for each in closing:
            each.awaits_last()
        yield
        for each in closing:
            each.close()
        if action == self._held_by:
            self._held_by = None
        self.advance()

    def wait(self) -> None:
        """Wait for everything that is being gathered."""
        for each in self._open:
            each.arrive()

    def finish(self) -> None:
        """Wait for the reductions of the step and set ``.grad`` of the parameters at rest."""
        with torch.no_grad():
            sums = [entry for each in self._open for entry in each.reduced()]
            self._add_parts([value for share, value in sums if share.is_part])
            for share, value in sums:
                set_gradient(share.at_rest, value)
        self._forget()

    def advance(self) -> None:
        """Post the reductions whose turn has come."""
        while self._held_by is None and self._queue and self._queue[-1].closed:
            self._queue.pop().reduce()

    def zeros(self, count: int) -> Tensor:
        """As many zeros, in memory that all units share."""
        if self._zeros is None or len(self._zeros) < count:
            device = self._units[0].shares[0].at_rest.device
            self._zeros = torch.zeros(count, dtype=self.wide, device=device)
        return self._zeros[:count]

    def _before_forward(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._open:
            raise RuntimeError(
                "The model was called outside of a step, where a rank has only its shards of the"
                " parameters. Call self.step(batch), in validation and prediction too."
            )
        self._open[number].refuse_if_closed()
        self._open[number].arrive()
        if self.dtype == torch.bfloat16:
            return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)
        return None

    def _last_backwards(self, program: Sequence[Action]) -> dict[Action, list[_InStep]]:
        """The last backward that reaches each unit -> these units."""
        last = {each.stage: at for at, each in enumerate(program) if each.kind == BACKWARD}
        closing: dict[Action, list[_InStep]] = {}
        for each in self._open:
            places = [last[stage] for stage in each.unit.stages if stage in last]
            if places:
                closing.setdefault(program[max(places)], []).append(each)
        return closing

    def _add_parts(self, parts: list[Tensor]) -> None:
        if self.tensor_group is None or not parts:
            return
        flat = torch.cat([each.reshape(-1) for each in parts])
        dist.all_reduce(flat, group=self.tensor_group)
        for each, total in zip(parts, flat.split([each.numel() for each in parts]), strict=True):
            each.copy_(total.view(each.shape))

    def _forget(self) -> None:
        self._open, self._queue, self._closing = [], [], {}
        self._held_by = self._zeros = None


class _InStep:
    """One unit in one step.

    Attributes:
        closed: whether no backward of the step adds to its gradients any more.
    """

    def __init__(self, unit: Unit, run: Gathering, training: bool) -> None:
        self.unit, self._run = unit, run
        self._ranks = run.group.size()
        self._rest = [share.at_rest for share in unit.shares]
        self._trained = [
            number for number, rest in enumerate(self._rest) if training and rest.requires_grad
        ]
        for number in self._trained:
            refuse_hooks(unit.shares[number].places[0][1], self._rest[number])
        self._live: list[nn.Parameter] = []
        self._work: dist.Work | None = None
        self._everyone: Tensor | None = None
        self._sums: Tensor | None = None
        self._places: dict[int, Tensor] = {}  # of gradients in the sums, [ranks, *chunk]
        self._added: set[int] = set()
        self._awaited: set[int] | None = None
        self._shard: Tensor | None = None  # of the sums of all ranks
        self._reduction: dist.Work | None = None
        self.closed = False
        if self._ranks > 1:
            self._gather()

    def _gather(self) -> None:
        sizes = [prod(share.chunk) for share in self.unit.shares]
        mine = self._rest[0].to_local().new_empty(sum(sizes), dtype=self._run.dtype)
        for rest, place in zip(self._rest, mine.split(sizes), strict=True):
            shard = rest.to_local()
            place[: shard.numel()].copy_(shard.reshape(-1))
        self._everyone = mine.new_empty(self._ranks * len(mine))
        self._work = all_gather_into(self._everyone, mine, group=self._run.group, async_op=True)

    def arrive(self) -> None:
        """Wait for the parameters, and let the modules read them."""
        if self._live or self.closed:
            return
        with torch.no_grad():
            for share, rest, value in zip(
                self.unit.shares, self._rest, self._values(), strict=True
            ):
                live = nn.Parameter(value, rest.requires_grad)
                self._live.append(live)
                share.put(live)
        for number in self._trained:
            self._live[number].register_post_accumulate_grad_hook(partial(self._add, number))

    def _values(self) -> list[Tensor]:
        if self._work is None:
            return [rest.to_local().detach().to(self._run.dtype) for rest in self._rest]
        self._work.wait()
        assert self._everyone is not None
        rows, self._everyone, self._work = self._everyone.view(self._ranks, -1), None, None
        sizes = [prod(share.chunk) for share in self.unit.shares]
        values = []
        for share, part in zip(self.unit.shares, rows.split(sizes, 1), strict=True):
            dim = share.dim
            whole = part.unflatten(1, share.chunk).movedim(0, dim).flatten(dim, dim + 1)
            values.append(whole.narrow(dim, 0, share.shape[dim]).contiguous())
        return values

    def _add(self, number: int, live: Tensor) -> None:
        """Take a gradient that a backward has just made."""
        gradient, live.grad = live.grad, None
        assert gradient is not None
        self.refuse_if_closed()
        if self._sums is None:
            self._make_sums(gradient.device)
        share = self.unit.shares[number]
        for part, place in parts_of(gradient, self._places[number], share.dim):
            if number in self._added:
                place.add_(part)
            else:
                place.copy_(part)
        self._added.add(number)
        if self._awaited is not None:
            self._awaited.discard(number)
            if not self._awaited:
                self.close()
                self._run.advance()

    def _make_sums(self, device: torch.device) -> None:
        shares = [self.unit.shares[number] for number in self._trained]
        sizes = [prod(share.chunk) for share in shares]
        self._sums = torch.empty(self._ranks, sum(sizes), dtype=self._run.wide, device=device)
        # What pads a parameter stays as it is: nobody reads the sums of it.
        for number, share, part in zip(
            self._trained, shares, self._sums.split(sizes, 1), strict=True
        ):
            self._places[number] = part.unflatten(1, share.chunk)

    def awaits_last(self) -> None:
        """The last backward of the step is next: each parameter's gradient is added once more.

        Raises:
            ValueError: if no forward has waited for the parameters.
        """
        if not self._live:
            names = ", ".join(type(module).__name__ for module in self.unit.modules)
            raise ValueError(
                f"A stage ran without calling a module that it holds ({names}), so parameters were"
                " not waited for and would not be trained. Call embed, head and every layer in the"
                " model's forward, as modules: self.layers[number](hidden, ...)."
            )
        # Frozen parameters say nothing, and a recomputation may read them to the action's end.
        self._awaited = set(range(len(self._rest)))

    def refuse_if_closed(self) -> None:
        """Raise RuntimeError where the unit's last gradient of the step has been taken."""
        if self.closed:
            names = ", ".join(type(module).__name__ for module in self.unit.modules)
            raise RuntimeError(
                f"{names} runs, or gets a gradient, after its gradients of the step were complete."
                " A checkpoint of your model's own with use_reentrant=True does that: use False."
                " Between a step and its optimizer the model cannot be called."
            )

    def close(self) -> None:
        """Nothing of the step uses the parameters any more; a second call does nothing."""
        if self.closed:
            return
        if self._work is not None:
            self._work.wait()
        self.free()
        self.closed = True

    def free(self) -> None:
        """Let the modules read the parameters at rest."""
        for share, rest in zip(self.unit.shares, self._rest, strict=True):
            share.put(cast(nn.Parameter, rest))
        self._live, self._everyone, self._work = [], None, None

    def reduce(self) -> None:
        """Post the reduction, of zeros where no backward came through."""
        if not self._trained:
            return
        count = self._ranks * sum(prod(self.unit.shares[each].chunk) for each in self._trained)
        for number in set(self._trained) - self._added if self._added else ():
            self._places[number].zero_()
        sums = self._run.zeros(count) if self._sums is None else self._sums.view(-1)
        self._places, self._sums = {}, None
        if self._ranks == 1:
            self._shard = sums if self._added else sums.clone()
            return
        self._shard = sums.new_empty(count // self._ranks)
        self._reduction = reduce_scatter_into(
            self._shard, sums, group=self._run.group, async_op=True
        )

    def reduced(self) -> Iterator[tuple[Share, Tensor]]:
        """Wait for the sums: this rank's shard of every trained parameter's gradient."""
        if not self._trained:
            return
        if self._reduction is not None:
            self._reduction.wait()
        assert self._shard is not None, "a step has ended"
        shares = [self.unit.shares[number] for number in self._trained]
        parts = self._shard.split([prod(share.chunk) for share in shares])
        for number, share, part in zip(self._trained, shares, parts, strict=True):
            rows = self._rest[number].to_local().shape[share.dim]
            yield share, part.view(share.chunk).narrow(share.dim, 0, rows)


def set_gradient(rest: DTensor, value: Tensor) -> None:
    """Set ``.grad`` of a parameter at rest; ``value``: that of this rank's shard, of any dtype."""
    rest.grad = DTensor.from_local(
        value.to(rest.dtype),
        rest.device_mesh,
        rest.placements,
        run_check=False,
        shape=rest.shape,
        stride=rest.stride(),
    )


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Arguments of a forward with floating-point tensors in the dtype of computation."""
    if isinstance(values, Tensor):
        return values.to(dtype) if values.is_floating_point() else values
    if isinstance(values, dict):
        return {key: cast_floats(value, dtype) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(cast_floats(value, dtype) for value in values)
    return values
