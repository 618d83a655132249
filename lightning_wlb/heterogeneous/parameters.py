"""The parameters of a step on heterogeneous pipelines, pulled from shards; gradients pushed back.

This is the counterpart of :mod:`~lightning_wlb.training.gather_and_reduce` for steps whose
pipelines differ from the mesh's. :mod:`~lightning_wlb.training.bucket_lifetimes` decides when each
bucket travels, :mod:`.planning.exchanges` what every rank sends to every other in each turn; this
module sends it. A turn is one uneven all-to-all over all ranks, even those that receive nothing.

Frozen parameters are pulled and never pushed. A shard gets the sum of the gradients over all
pipelines and context ranks, and over tensor-parallel ranks that hold equal copies of the parameter;
each copy of a tied weight gets the whole sum. Sums run in the order of ranks, so repeated steps
give the same bits, and so do copies of a shard.

Cost: a step holds its whole stage in the compute dtype, and gradient sums in their dtype from a
first gradient to the push. Sender and receiver copy each piece once. Not run on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_wlb.heterogeneous.pipelines import HeterogeneousStage
from lightning_wlb.heterogeneous.planning.exchanges import ExchangedPiece, TurnExchange
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.training.bucket_lifetimes import BucketInStep, StepParameters
from lightning_wlb.training.sharded_parameters import refuse_hooks, set_gradient


class ExchangedParameters(StepParameters):
    """The :class:`.StepParameters` of a rank in steps on some heterogeneous pipelines.

    Args:
        model: this rank's part of the model on the mesh, with its shards.
        group: all ranks; nothing else is sent over it.
    """

    _in_step: list[_ExchangedBucket]  # type: ignore[assignment]

    def __init__(
        self,
        stage: HeterogeneousStage,
        model: Decoder,
        group: dist.ProcessGroup,
        sum_dtype: torch.dtype,
    ) -> None:
        super().__init__(stage.waiting, stage.pipeline.dtype, sum_dtype)
        self.stage, self.group, self.device = stage, group, stage.pipeline.device
        tied = model.tied
        self._sharded = [
            (model.get_submodule(path), attribute, tied.get(name, name))
            for name, _ in model.named_parameters()
            for path, _, attribute in [name.rpartition(".")]
        ]

    def _gather(self, *, training: bool) -> Iterator[BucketInStep]:
        sharded = dict(self._shards())
        self._check(sharded)
        shards = {name: parameter.to_local().detach() for name, parameter in sharded.items()}
        for turn in range(self.stage.redistribution.turns):
            yield _ExchangedBucket(turn, self, shards, training)

    def finish(self) -> None:
        """Wait for the gradients, and set ``.grad`` of the sharded parameters."""
        frozen = self.stage.redistribution.weights.frozen
        trained = [(name, shard) for name, shard in self._shards() if name not in frozen]
        with torch.no_grad():
            totals = {
                name: torch.zeros_like(shard.to_local(), dtype=self.sum_dtype)
                for name, shard in trained
            }
            for each in reversed(self._in_step):
                each.add_reduced_to(totals)
            for name, shard in trained:
                set_gradient(shard, totals[name])
        self._forget()

    def _check(self, sharded: Mapping[str, DTensor]) -> None:
        """Refuse parameters that were frozen or unfrozen since the run began, or have hooks."""
        frozen = self.stage.redistribution.weights.frozen
        changed = [n for n, each in sharded.items() if each.requires_grad == (n in frozen)]
        if changed:
            raise ValueError(
                f"frozen or unfrozen since the run began: {', '.join(changed[:4])}. The exchange"
                " with other pipelines was fixed then. Freeze before the run, or use dynamic='off'."
            )
        for name, each in sharded.items():
            if name not in frozen:
                refuse_hooks(name, each)

    def _shards(self) -> Iterator[tuple[str, DTensor]]:
        for module, attribute, name in self._sharded:
            yield name, cast(DTensor, module._parameters[attribute])


class _ExchangedBucket(BucketInStep):
    """The bucket that this rank exchanges in one turn; empty if only other ranks have one."""

    _run: ExchangedParameters

    def __init__(
        self, turn: int, run: ExchangedParameters, shards: Mapping[str, Tensor], training: bool
    ) -> None:
        stage, own = run.stage, run.stage.redistribution
        self._turn, self._shapes = turn, own.shapes(turn)
        self._numbered = list(self._shapes)
        numbers = range(len(self._numbered)) if training else ()
        trained = [n for n in numbers if self._numbered[n] not in own.weights.frozen]
        places = [stage.places[name] for name in self._numbered]
        super().__init__(run, places, trained, (stage.pipeline.rank.pipeline,), self._numbered)
        self._sums: dict[str, Tensor] = {}
        self._pull: RunningExchange | None = RunningExchange(
            own.exchange(turn), shards, run, run.dtype
        )
        self._push: RunningExchange | None = None

    def _values(self) -> list[Tensor]:
        assert self._pull is not None
        values = self._new(self._numbered, self._run.dtype)
        self._pull.arrive(values)
        self._pull = None
        return list(values.values())

    def _drop_gather(self) -> None:
        if self._pull is not None:
            self._pull.wait()
        self._pull = None

    def _add_to_sums(self, number: int, gradient: Tensor) -> None:
        name = self._numbered[number]
        if number in self._added:
            self._sums[name] += gradient
        else:
            self._sums[name] = gradient.to(self._run.sum_dtype, copy=True)

    def reduce(self) -> None:
        """Push the sums; parameters that no backward has reached push zeros."""
        exchange = self._run.stage.redistribution.exchange(self._turn, push=True)
        trained = [self._numbered[number] for number in self._trained]
        missing = [name for name in trained if name not in self._sums]
        for name, value in self._new(missing, self._run.sum_dtype).items():
            self._sums[name] = value.zero_()
        self._push = RunningExchange(exchange, self._sums, self._run, self._run.sum_dtype)
        self._sums = {}

    def add_reduced_to(self, totals: Mapping[str, Tensor]) -> None:
        """Wait for the push, and add the received gradients to the totals of this rank's shards."""
        assert self._push is not None, "a step has ended"
        self._push.arrive(totals, add=True)

    def _new(self, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
        device = self._run.device
        return {n: torch.empty(self._shapes[n], dtype=dtype, device=device) for n in names}


class RunningExchange:
    """A running all-to-all of parts of ``tensors``, by name; collective over all ranks."""

    def __init__(
        self,
        exchange: TurnExchange,
        tensors: Mapping[str, Tensor],
        run: ExchangedParameters,
        dtype: torch.dtype,
    ) -> None:
        out, self._into = exchange
        counts = [_counts(pieces, run.group.size()) for pieces in exchange]
        self._sent, self._got = (
            torch.empty(sum(each), dtype=dtype, device=run.device) for each in counts
        )
        for piece, place in _parts(self._sent, out):
            box = tensors[piece.name][piece.place]
            place.view(box.shape).copy_(box)
        self._work = dist.all_to_all_single(
            self._got, self._sent, counts[1], counts[0], group=run.group, async_op=True
        )

    def wait(self) -> None:
        """Wait until everything has arrived and the sent buffers may be overwritten."""
        self._work.wait()

    def arrive(self, target: Mapping[str, Tensor], *, add: bool = False) -> None:
        """Wait, and copy the received parts into ``target`` or add them to it."""
        self.wait()
        for piece, part in _parts(self._got, self._into):
            box = target[piece.name][piece.place]
            if add:
                box.add_(part.view(box.shape))
            else:
                box.copy_(part.view(box.shape))


def _parts(
    buffer: Tensor, pieces: Sequence[ExchangedPiece]
) -> Iterator[tuple[ExchangedPiece, Tensor]]:
    """Each piece with its part of a flat buffer."""
    return zip(pieces, buffer.split([each.elements for each in pieces]), strict=True)


def _counts(pieces: Sequence[ExchangedPiece], ranks: int) -> list[int]:
    counts = [0] * ranks
    for each in pieces:
        counts[each.peer] += each.elements
    return counts
