"""The parameters of a step on the mesh: all-gathered ahead of use, gradients reduce-scattered.

Between steps a rank holds a shard of each parameter of its stages (:mod:`.sharded_parameters`),
grouped into buckets: a layer, an end, or the rest of the model (:mod:`.bucket_lifetimes`).

Reduction is a plain sum: the loss is divided by the *global* number of target tokens. The gradient
of a parameter that tensor-parallel ranks hold alike is summed over them at the end.

Cost: within a step this is ZeRO-1. From its first forward to its last backward a bucket is held
whole, 6 bytes per parameter in bf16. Not for models whose stages do not fit that way; use more
pipeline or tensor parallelism. One more copy of a bucket is made when it is gathered, and of its
gradients where a backend reduces in place. On one rank with one dtype nothing is copied or sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.distributed.collectives import all_gather_into, reduce_scatter_into
from lightning_wlb.training.bucket_lifetimes import BucketInStep, StepParameters
from lightning_wlb.training.sharded_parameters import (
    Bucket,
    ShardedParameter,
    chunks_of,
    refuse_hooks,
    set_gradient,
)


class ParameterBuckets(StepParameters):
    """The :class:`.StepParameters` of a rank on the mesh.

    Args:
        buckets: all parameters of the rank's stages, in the order of first use.
        group: ranks that share the parameters; used for nothing else, to run beside other work.
    """

    _in_step: list[_MeshBucket]  # type: ignore[assignment]

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        sum_dtype: torch.dtype,
    ) -> None:
        waiting = {module: (n,) for n, each in enumerate(buckets) for module in each.modules}
        super().__init__(waiting, dtype, sum_dtype)
        self.group, self.tensor_group = group, tensor_group
        self._buckets = buckets
        self._zeros: Tensor | None = None

    def _gather(self, *, training: bool) -> Iterator[BucketInStep]:
        for bucket in self._buckets:
            yield _MeshBucket(bucket, self, training)

    def finish(self) -> None:
        """Wait for the reductions of the step and set ``.grad`` of the sharded parameters."""
        with torch.no_grad():
            sums = [entry for each in self._in_step for entry in each.reduced()]
            self._add_over_tensor_ranks([value for each, value in sums if each.is_part])
            for each, value in sums:
                set_gradient(each.shard, value)
        self._forget()

    def zeros(self, count: int) -> Tensor:
        """``count`` zeros, in memory that all buckets share."""
        if self._zeros is None or len(self._zeros) < count:
            device = self._buckets[0].parameters[0].shard.device
            self._zeros = torch.zeros(count, dtype=self.sum_dtype, device=device)
        return self._zeros[:count]

    def _add_over_tensor_ranks(self, parts: list[Tensor]) -> None:
        if self.tensor_group is None or not parts:
            return
        flat = torch.cat([each.reshape(-1) for each in parts])
        dist.all_reduce(flat, group=self.tensor_group)
        for each, total in zip(parts, flat.split([each.numel() for each in parts]), strict=True):
            each.copy_(total.view(each.shape))

    def _forget(self) -> None:
        super()._forget()
        self._zeros = None


class _MeshBucket(BucketInStep):
    _run: ParameterBuckets

    def __init__(self, bucket: Bucket, run: ParameterBuckets, training: bool) -> None:
        self._held, self._ranks = bucket.parameters, run.group.size()
        self._shards = [each.shard for each in bucket.parameters]
        names = [type(module).__name__ for module in bucket.modules]
        numbered = enumerate(self._shards)
        trained = [number for number, shard in numbered if training and shard.requires_grad]
        for number in trained:
            refuse_hooks(self._held[number].places[0][1], self._shards[number])
        places = [each.places for each in self._held]
        super().__init__(run, places, trained, bucket.stages, names)
        self._gather: dist.Work | None = None
        self._gathered: Tensor | None = None
        self._sums: Tensor | None = None
        self._chunks: dict[int, Tensor] = {}  # parameter -> its part of the sums: [ranks, *chunk]
        self._own_sums: Tensor | None = None  # this rank's part of the sums over all ranks
        self._reduction: dist.Work | None = None
        if self._ranks > 1:
            self._post_gather()

    def _post_gather(self) -> None:
        sizes = [prod(each.chunk) for each in self._held]
        mine = self._shards[0].to_local().new_empty(sum(sizes), dtype=self._run.dtype)
        for shard, place in zip(self._shards, mine.split(sizes), strict=True):
            local = shard.to_local()
            place[: local.numel()].copy_(local.reshape(-1))
        self._gathered = mine.new_empty(self._ranks * len(mine))
        self._gather = all_gather_into(self._gathered, mine, group=self._run.group, async_op=True)

    def _values(self) -> list[Tensor]:
        gathered = self._gathered
        if gathered is None:
            return [shard.to_local().detach().to(self._run.dtype) for shard in self._shards]
        self._drop_gather()
        sizes = [prod(each.chunk) for each in self._held]
        rows, values = gathered.view(self._ranks, -1).split(sizes, 1), []
        for each, part in zip(self._held, rows, strict=True):
            dim = each.dim
            whole = part.unflatten(1, each.chunk).movedim(0, dim).flatten(dim, dim + 1)
            values.append(whole.narrow(dim, 0, each.shape[dim]).contiguous())
        return values

    def _drop_gather(self) -> None:
        if self._gather is not None:
            self._gather.wait()
        self._gather = self._gathered = None

    def _add_to_sums(self, number: int, gradient: Tensor) -> None:
        if self._sums is None:
            self._make_sums(gradient.device)
        for part, place in chunks_of(gradient, self._chunks[number], self._held[number].dim):
            if number in self._added:
                place.add_(part)
            else:
                place.copy_(part)

    def _make_sums(self, device: torch.device) -> None:
        trained = [self._held[number] for number in self._trained]
        sizes = [prod(each.chunk) for each in trained]
        self._sums = torch.empty(self._ranks, sum(sizes), dtype=self._run.sum_dtype, device=device)
        # The padding of a parameter stays uninitialised: nobody reads its sums.
        parts = self._sums.split(sizes, 1)
        for number, each, part in zip(self._trained, trained, parts, strict=True):
            self._chunks[number] = part.unflatten(1, each.chunk)

    def reduce(self) -> None:
        """Post the reduction; without a backward it reduces zeros."""
        if not self._trained:
            return
        count = self._ranks * sum(prod(self._held[number].chunk) for number in self._trained)
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
        trained = [self._held[number] for number in self._trained]
        parts = self._own_sums.split([prod(each.chunk) for each in trained])
        for number, each, part in zip(self._trained, trained, parts, strict=True):
            rows = self._shards[number].to_local().shape[each.dim]
            yield each, part.view(each.chunk).narrow(each.dim, 0, rows)
