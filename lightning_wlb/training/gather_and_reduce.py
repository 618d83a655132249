"""A step's parameters and gradients: gathered ahead of use, reduced behind the last backward.

Between steps a rank holds a shard of each parameter of its stages (:mod:`.sharded_parameters`),
grouped into buckets: a layer, an end, or what else the model has. In a step

* every bucket's gather is posted, in the order in which the stages use them first; a forward waits
  for the bucket of the module that it enters, and for no other;
* each backward adds its gradients to the bucket's sums, in the dtype of reduction;
* when the last backward of the step has passed through a bucket, its parameters are freed and its
  reduce-scatter is posted, so that it runs while the backward goes on.

Every rank that shares a stage posts the same operations in the same order, whatever micro-batches
it has: gathers by first use, reductions from the last bucket to the first, each as soon as those
before it have been posted. A rank without micro-batches posts zeros. So no two ranks can wait for
each other here, and the sums do not depend on who is first: a step gives the same bits again.

Replicas that share a micro-batch wait for each other in its attention too. A rank therefore reduces
nothing before the last such micro-batch is over. On a device that runs one operation after the
other, two ranks could else each have the reduction that the other waits for in front of the
attention that the other waits for.

Reduction is a plain sum: the loss is divided by the *global* number of target tokens. The gradient
of a parameter that tensor-parallel ranks hold alike is summed over them at the end.

Cost: within a step this is ZeRO-1. From its first forward to its last backward a bucket is held
whole, 6 bytes per parameter in bf16. Not for models whose stages do not fit that way; use more
pipeline or tensor parallelism. One more copy of a bucket is made when it is gathered, and of its
gradients where a backend reduces in place. On one rank with one dtype nothing is copied or sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_wlb.distributed.collectives import all_gather_into, reduce_scatter_into
from lightning_wlb.schedule.actions import BACKWARD, Action
from lightning_wlb.training.parameter_hooks import (
    before_forward,
    gradient_too_late,
    module_not_called,
    take_gradients,
)
from lightning_wlb.training.sharded_parameters import (
    Bucket,
    ShardedParameter,
    chunks_of,
    refuse_hooks,
    set_gradient,
)


class ParameterBuckets:
    """The :class:`.StepParameters` of a rank on the mesh.

    Args:
        buckets: all parameters of the rank's stages, in the order of first use.
        group: ranks that share the parameters; used for nothing else, so that NCCL runs it on a
            stream of its own and gloo in threads.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        sum_dtype: torch.dtype,
    ) -> None:
        self.group, self.tensor_group = group, tensor_group
        self.dtype, self.sum_dtype = dtype, sum_dtype
        self._buckets = buckets
        self._in_step: list[_BucketInStep] = []
        self._to_reduce: list[_BucketInStep] = []  # the next one last
        self._closed_by: dict[Action, list[_BucketInStep]] = {}
        self._held_by: Action | None = None  # behind which reductions may be posted
        self._zeros: Tensor | None = None
        for number, bucket in enumerate(buckets):
            for module in bucket.modules:
                before_forward(module, partial(self._wait_for, number), dtype)

    @contextmanager
    def step(self, program: Sequence[Action], shared: Collection[int] = ()) -> Iterator[None]:
        """Post the gathers of a step, and at its end the reductions that are left.

        Arguments are those of :meth:`.StepParameters.step`.
        """
        training = torch.is_grad_enabled()
        self._forget()  # what a step has left whose gradients nobody wanted
        try:
            with torch.no_grad():
                for bucket in self._buckets:
                    self._in_step.append(_BucketInStep(bucket, self, training))
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
        """Run one action inside; the buckets for which it is the last backward are reduced."""
        closing = self._closed_by.get(action, [])
        for each in closing:
            each.expect_last_gradients()
        yield
        for each in closing:
            each.close()
        if action == self._held_by:
            self._held_by = None
        self.advance()

    def wait(self) -> None:
        """Wait for everything that is being gathered."""
        for each in self._in_step:
            each.wait()

    def finish(self) -> None:
        """Wait for the reductions of the step and set ``.grad`` of the sharded parameters."""
        with torch.no_grad():
            sums = [entry for each in self._in_step for entry in each.reduced()]
            self._add_over_tensor_ranks([value for each, value in sums if each.is_part])
            for each, value in sums:
                set_gradient(each.shard, value)
        self._forget()

    def advance(self) -> None:
        """Post the reductions whose turn has come."""
        while self._held_by is None and self._to_reduce and self._to_reduce[-1].closed:
            self._to_reduce.pop().reduce()

    def zeros(self, count: int) -> Tensor:
        """``count`` zeros, in memory that all buckets share."""
        if self._zeros is None or len(self._zeros) < count:
            device = self._buckets[0].parameters[0].shard.device
            self._zeros = torch.zeros(count, dtype=self.sum_dtype, device=device)
        return self._zeros[:count]

    def _wait_for(self, number: int) -> None:
        if not self._in_step:
            raise RuntimeError(
                "The model was called outside of a step, where a rank has only its shards of the"
                " parameters. Call self.step(batch), in validation and prediction too."
            )
        self._in_step[number].refuse_if_closed()
        self._in_step[number].wait()

    def _last_backwards(self, program: Sequence[Action]) -> dict[Action, list[_BucketInStep]]:
        """Map the last backward that reaches each bucket to these buckets."""
        last = {each.stage: at for at, each in enumerate(program) if each.kind == BACKWARD}
        closed_by: dict[Action, list[_BucketInStep]] = {}
        for each in self._in_step:
            places = [last[stage] for stage in each.bucket.stages if stage in last]
            if places:
                closed_by.setdefault(program[max(places)], []).append(each)
        return closed_by

    def _add_over_tensor_ranks(self, parts: list[Tensor]) -> None:
        if self.tensor_group is None or not parts:
            return
        flat = torch.cat([each.reshape(-1) for each in parts])
        dist.all_reduce(flat, group=self.tensor_group)
        for each, total in zip(parts, flat.split([each.numel() for each in parts]), strict=True):
            each.copy_(total.view(each.shape))

    def _forget(self) -> None:
        self._in_step, self._to_reduce, self._closed_by = [], [], {}
        self._held_by = self._zeros = None


class _BucketInStep:
    """One bucket in one step; ``closed`` when no backward adds to its gradients any more."""

    def __init__(self, bucket: Bucket, run: ParameterBuckets, training: bool) -> None:
        self.bucket, self._run = bucket, run
        self._ranks = run.group.size()
        self._shards = [each.shard for each in bucket.parameters]
        self._trained = [
            number for number, shard in enumerate(self._shards) if training and shard.requires_grad
        ]
        for number in self._trained:
            refuse_hooks(bucket.parameters[number].places[0][1], self._shards[number])
        self._live: list[nn.Parameter] = []
        self._gather: dist.Work | None = None
        self._gathered: Tensor | None = None
        self._sums: Tensor | None = None
        self._chunks: dict[int, Tensor] = {}  # of the sums, by parameter: [ranks, *chunk]
        self._added: set[int] = set()
        self._awaited: set[int] | None = None
        self._own_sums: Tensor | None = None  # this rank's, over all ranks
        self._reduction: dist.Work | None = None
        self.closed = False
        if self._ranks > 1:
            self._post_gather()

    def _post_gather(self) -> None:
        sizes = [prod(each.chunk) for each in self.bucket.parameters]
        mine = self._shards[0].to_local().new_empty(sum(sizes), dtype=self._run.dtype)
        for shard, place in zip(self._shards, mine.split(sizes), strict=True):
            local = shard.to_local()
            place[: local.numel()].copy_(local.reshape(-1))
        self._gathered = mine.new_empty(self._ranks * len(mine))
        self._gather = all_gather_into(self._gathered, mine, group=self._run.group, async_op=True)

    def wait(self) -> None:
        """Wait for the parameters, and let the modules read them."""
        if self._live or self.closed:
            return
        with torch.no_grad():
            for each, shard, value in zip(
                self.bucket.parameters, self._shards, self._values(), strict=True
            ):
                live = nn.Parameter(value, shard.requires_grad)
                self._live.append(live)
                each.put(live)
        for number in self._trained:
            take_gradients(self._live[number], partial(self._add, number))

    def _values(self) -> list[Tensor]:
        if self._gather is None:
            return [shard.to_local().detach().to(self._run.dtype) for shard in self._shards]
        self._gather.wait()
        assert self._gathered is not None
        rows, self._gathered, self._gather = self._gathered.view(self._ranks, -1), None, None
        sizes = [prod(each.chunk) for each in self.bucket.parameters]
        values = []
        for each, part in zip(self.bucket.parameters, rows.split(sizes, 1), strict=True):
            dim = each.dim
            whole = part.unflatten(1, each.chunk).movedim(0, dim).flatten(dim, dim + 1)
            values.append(whole.narrow(dim, 0, each.shape[dim]).contiguous())
        return values

    def _add(self, number: int, gradient: Tensor) -> None:
        """Add a gradient that a backward has just made."""
        self.refuse_if_closed()
        if self._sums is None:
            self._make_sums(gradient.device)
        dim = self.bucket.parameters[number].dim
        for part, place in chunks_of(gradient, self._chunks[number], dim):
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
        trained = [self.bucket.parameters[number] for number in self._trained]
        sizes = [prod(each.chunk) for each in trained]
        self._sums = torch.empty(self._ranks, sum(sizes), dtype=self._run.sum_dtype, device=device)
        # What pads a parameter stays as it is: nobody reads the sums of it.
        for number, each, part in zip(
            self._trained, trained, self._sums.split(sizes, 1), strict=True
        ):
            self._chunks[number] = part.unflatten(1, each.chunk)

    def expect_last_gradients(self) -> None:
        """Begin the last backward of the step, in which each parameter gets its last gradient.

        Raises:
            ValueError: if no forward has waited for the parameters.
        """
        if not self._live:
            raise module_not_called(self._module_names())
        # Frozen parameters say nothing, and a recomputation may read them to the action's end.
        self._awaited = set(range(len(self._shards)))

    def refuse_if_closed(self) -> None:
        """Raise RuntimeError where the bucket's last gradient of the step has been taken."""
        if self.closed:
            raise gradient_too_late(", ".join(self._module_names()))

    def close(self) -> None:
        """Free the parameters, which the step no longer uses; a second call does nothing."""
        if self.closed:
            return
        if self._gather is not None:
            self._gather.wait()
        self.free()
        self.closed = True

    def free(self) -> None:
        """Let the modules read the sharded parameters."""
        for each, shard in zip(self.bucket.parameters, self._shards, strict=True):
            each.put(cast(nn.Parameter, shard))
        self._live, self._gathered, self._gather = [], None, None

    def reduce(self) -> None:
        """Post the reduction, of zeros where no backward came through."""
        if not self._trained:
            return
        count = self._ranks * sum(prod(self.bucket.parameters[n].chunk) for n in self._trained)
        for number in set(self._trained) - self._added if self._added else ():
            self._chunks[number].zero_()
        sums = self._run.zeros(count) if self._sums is None else self._sums.view(-1)
        self._chunks, self._sums = {}, None
        if self._ranks == 1:
            self._own_sums = sums if self._added else sums.clone()
            return
        self._own_sums = sums.new_empty(count // self._ranks)
        self._reduction = reduce_scatter_into(
            self._own_sums, sums, group=self._run.group, async_op=True
        )

    def reduced(self) -> Iterator[tuple[ShardedParameter, Tensor]]:
        """Wait for the reduction; yield this rank's shard of every trained parameter's gradient."""
        if not self._trained:
            return
        if self._reduction is not None:
            self._reduction.wait()
        assert self._own_sums is not None, "a step has ended"
        trained = [self.bucket.parameters[number] for number in self._trained]
        parts = self._own_sums.split([prod(each.chunk) for each in trained])
        for number, each, part in zip(self._trained, trained, parts, strict=True):
            rows = self._shards[number].to_local().shape[each.dim]
            yield each, part.view(each.chunk).narrow(each.dim, 0, rows)

    def _module_names(self) -> list[str]:
        return [type(module).__name__ for module in self.bucket.modules]
