"""A batch sampler for any torch ``DataLoader``, and so for Accelerate: steps of equal work.

Every step takes the next ``sequences`` of the epoch's order, whatever the number of ranks, and
:func:`.plan_step` says which rank runs which in which micro-batch. So a step's gradient does not
depend on the plan where the loss is divided by the tokens of the whole step.

Under a torchdata ``StatefulDataLoader`` the loader's state holds the position. Elsewhere
:meth:`BalancedBatchSampler.state_dict` counts the batches that were asked for, which workers of a
plain ``DataLoader`` run ahead of. Behind a step's last batch other ranks and micro-batches go on.

Cost: that of planning, a millisecond for a step of some hundred sequences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from lightning_wlb.adapters.plan_step import plan_step, shape_of
from lightning_wlb.argument_checks import flag, whole


class BalancedBatchSampler(Sampler[list[int]]):
    """Micro-batches of one rank, or of all ranks in turn, as numbers of sequences.

    Args:
        lengths: tokens of each sequence of the data set.
        sequences: number of sequences in a step, over all ranks and micro-batches.
        ranks: data-parallel ranks.
        rank: whose micro-batches are yielded; None: those of all ranks in the order
            [micro-batch][rank], which Accelerate deals to its processes one by one.
        micro_batches: micro-batches of each rank in a step: the steps of gradient accumulation.
        seed: gives the order, which is new in each epoch.
        shuffle: whether the order is random; else sequences come as they are.
        options: ``max_tokens``, ``model`` or ``work``, ``lockstep`` of :func:`.plan_step`.

    The sequences that are left at the end of an epoch and make no whole step are left out.

    Raises:
        ValueError: arguments out of range, fewer sequences than micro-batches in a step, or, when
            an epoch begins, a step whose sequences do not fit the micro-batches under the cap.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        *,
        sequences: int,
        ranks: int,
        rank: int | None = None,
        micro_batches: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        **options: Any,
    ) -> None:
        self.lengths = np.asarray(lengths)
        self.ranks = whole("ranks", ranks, 1)
        self.rank = None if rank is None else whole("rank", rank, 0)
        self.micro_batches = whole("micro_batches", micro_batches, 1)
        self.sequences = whole("sequences", sequences, self.ranks * self.micro_batches)
        self.seed, self.shuffle = whole("seed", seed, 0), flag("shuffle", shuffle)
        if options.get("model") is not None:
            options["model"] = shape_of(options["model"])  # once, and not in every step
        self.options, self.epoch, self.batches = options, 0, 0
        if len(self.lengths) < self.sequences or (self.rank or 0) >= self.ranks:
            raise ValueError(
                f"rank={rank} of ranks={ranks}, and {len(self.lengths)} sequences for steps of"
                f" {self.sequences}: ranks count from 0, and a step needs its sequences."
            )
        self._a_step = self.micro_batches * (self.ranks if self.rank is None else 1)
        self._order = {
            "lengths": hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest()[:16],
            "sequences": self.sequences,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def __len__(self) -> int:
        return len(self.lengths) // self.sequences * self._a_step

    def __iter__(self) -> Iterator[list[int]]:
        steps = self.steps()
        if self.options.get("max_tokens") is not None:
            steps = iter(list(steps))  # a step that does not fit ends the run before it begins
        position = 0
        for step in steps:
            own = step if self.rank is None else [step[self.rank]]
            for batch in (rank[k] for k in range(self.micro_batches) for rank in own):
                position += 1
                if position > self.batches:
                    self.batches = position
                    yield batch
        self.epoch, self.batches = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, whose order depends on the seed and its number."""
        if epoch != self.epoch:
            self.epoch, self.batches = whole("epoch", epoch, 0), 0

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, behind the last batch that was asked for, and of what order.

        ``a_step`` is how many batches a step has, over how many ``ranks``.
        """
        position = {"epoch": self.epoch, "batches": self.batches, "a_step": self._a_step}
        return {**position, "ranks": self.ranks, "order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where :meth:`state_dict` was taken.

        Behind a step's last batch the ranks and micro-batches may be others.

        Raises:
            ValueError: the position is inside a step of other batches, or of another order.
        """
        epoch, batches = (whole(name, state[name], 0) for name in ("epoch", "batches"))
        a_step = whole("a_step", state.get("a_step", self._a_step), 1)
        steps, rest = divmod(batches, a_step)
        order, ranks = state.get("order", self._order), state.get("ranks", self.ranks)
        if order != self._order or (rest and (a_step, ranks) != (self._a_step, self.ranks)):
            raise ValueError(
                f"The saved position, {rest} of {a_step} batches of step {steps}, is of the order"
                f" {order} on {ranks} ranks; here a step has {self._a_step} in {self._order} on"
                f" {self.ranks}. Sequences would be lost or repeated: resume with the same data and"
                " settings; other ranks and micro-batches may follow the last batch of a step."
            )
        self.epoch, self.batches = epoch, steps * self._a_step + rest

    def steps(self) -> Iterator[list[list[list[int]]]]:
        """The steps of the epoch, [rank][micro-batch] -> numbers of sequences."""
        order = np.arange(len(self.lengths))
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(len(order))
        for start in range(0, len(order) - self.sequences + 1, self.sequences):
            taken = np.sort(order[start : start + self.sequences])
            plan = plan_step(
                self.lengths[taken],
                ranks=self.ranks,
                micro_batches=self.micro_batches,
                no_empty=True,
                **self.options,
            )
            if len(plan.micro_batches[0]) > self.micro_batches:
                raise ValueError(
                    f"Step {start // self.sequences} of epoch {self.epoch} needs"
                    f" {len(plan.micro_batches[0])} micro-batches of max_tokens={plan.max_tokens}"
                    f" on a rank, more than micro_batches={self.micro_batches}. Raise one of them,"
                    f" or take fewer than sequences={self.sequences}."
                )
            names = taken.tolist()
            yield [[[names[i] for i in each] for each in rank] for rank in plan.micro_batches]
