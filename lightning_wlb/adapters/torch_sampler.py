"""A batch sampler for any torch ``DataLoader``, and so for Lightning and Accelerate: equal work.

Every step takes the next ``sequences`` of the epoch's order, whatever the number of ranks, and
:func:`.plan_step` says which rank runs which in which micro-batch. So a step's gradient does not
depend on the plan where the loss is divided by the tokens of the whole step.

Every iteration begins an epoch, as with torch's samplers: the one that ``set_epoch`` has named
last, or without it the next one. Only a position that was loaded is gone on from, once.

Under a torchdata ``StatefulDataLoader`` the loader's state holds the position. Elsewhere
:meth:`BalancedBatchSampler.state_dict` counts the batches that were asked for, which workers of a
plain ``DataLoader`` run ahead of. Behind a step's last batch other ranks and micro-batches go on,
behind an epoch's last batch the next epoch.

Cost: that of planning, a millisecond for a step of some hundred sequences.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from lightning_wlb.adapters.plan_step import plan_step, shape_of
from lightning_wlb.argument_checks import flag, whole

Step = list[list[list[int]]]
"""[rank][micro-batch] -> numbers of sequences."""


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
        options: ``max_tokens``, ``model``, ``work`` (no list), ``lockstep`` of :func:`.plan_step`.

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
        if not callable(options.get("work") or len):
            raise ValueError("work= is a list, but each step has other sequences: give a function.")
        self.options = options
        if len(self.lengths) < self.sequences or (self.rank or 0) >= self.ranks:
            raise ValueError(
                f"rank={rank} of ranks={ranks}, and {len(self.lengths)} sequences for steps of"
                f" {self.sequences}: ranks count from 0, and a step needs its sequences."
            )
        self._a_step = self.micro_batches * (self.ranks if self.rank is None else 1)
        self._order = {
            "lengths": _digest(self.lengths.astype("<i8").tobytes()),
            "sequences": self.sequences,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        # The position: batches of the epoch that were asked for, the last one of this step.
        self.epoch, self.batches, self._step = 0, 0, ""
        # Where the next iteration begins, and whether in an epoch that was set.
        self._next, self._is_set = (0, 0), False

    def __len__(self) -> int:
        return len(self.lengths) // self.sequences * self._a_step

    def __iter__(self) -> Iterator[list[int]]:
        # This runs when the first batch is asked for: loaders make iterators that they never use,
        # and Lightning sets the epoch of one that it has made.
        epoch, position = self._next
        # A StatefulDataLoader that stood at an epoch's end asks one iterator for some batches and
        # drops it for another: the first one does not count before its last batch.
        was_at_end = position >= len(self)
        if was_at_end:
            epoch, position = self._next = epoch + 1, 0
        self.epoch = epoch
        steps = self.steps(epoch, position // self._a_step)
        if self.options.get("max_tokens") is not None:
            steps = iter(list(steps))  # a step that does not fit ends the run before it begins
        for step in steps:
            own, digest = step if self.rank is None else [step[self.rank]], _digest(step)
            batches = [rank[k] for k in range(self.micro_batches) for rank in own]
            for batch in batches[position % self._a_step :]:
                if self.epoch != epoch:
                    raise ValueError(
                        f"set_epoch({self.epoch}) came when batches of epoch {epoch} had been asked"
                        " for, as by a loader's workers, which fetch ahead: set the epoch before,"
                        " on the sampler. Lightning and Accelerate's stateful loaders, which ask"
                        " earlier, resume from the state of a torchdata StatefulDataLoader."
                    )
                position += 1
                self.batches, self._step = position, digest
                if not was_at_end or position == len(self):
                    self._next = (self._next[0] if self._is_set else epoch + 1, 0)
                yield batch

    @property
    def sampler(self) -> BalancedBatchSampler:
        """Itself, since Lightning and Accelerate set the epoch of a batch sampler's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Let iterations begin this epoch, whose order depends on the seed and its number.

        A position that was loaded and is not begun stands if it is in this epoch. One in an
        earlier epoch, which was left before its end, is forgotten.

        Raises:
            ValueError: the loaded position is in a later epoch.
        """
        loaded = self._next if self._next[1] else None
        self._next = _within(whole("epoch", epoch, 0), loaded)
        self._is_set, (self.epoch, self.batches) = True, self._next

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, behind the last batch that was asked for, and of what order.

        ``a_step`` is how many batches a step has, ``step`` a digest of the one that is begun.
        """
        position = {"epoch": self.epoch, "batches": self.batches, "a_step": self._a_step}
        return {**position, "step": self._step, "order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where :meth:`state_dict` was taken.

        Behind a step's last batch the ranks, micro-batches and options may be others. Behind an
        epoch's last batch the next epoch begins, and loops that set epochs begin with that one.

        Raises:
            ValueError: the position is inside a step of other batches, of another order, or of a
                later epoch than ``set_epoch`` has named for the iteration.
        """
        epoch, batches = (whole(name, state[name], 0) for name in ("epoch", "batches"))
        a_step = whole("a_step", state.get("a_step", self._a_step), 1)
        steps, rest = divmod(batches, a_step)
        order, here = state.get("order", self._order), self._order
        if rest and order == here:  # inside of a step, which must be the same
            step = _digest(next(self.steps(epoch, steps), []))
            here = {**here, "a_step": self._a_step, "step": step}
            order = {**order, "a_step": a_step, "step": state.get("step", step)}
        if order != here:
            raise ValueError(
                f"The saved position, {rest} of {a_step} batches of step {steps}, is of the order"
                f" {order}; here it is {here}. Sequences would be lost or repeated: resume with the"
                " same data and settings; other ranks, micro-batches, models and caps may follow"
                " the last batch of a step."
            )
        position = epoch, steps * self._a_step + rest
        self._is_set = self._is_set and not self.batches  # for the next iteration alone
        if self._is_set:
            if position == (self._next[0], len(self)):
                warnings.warn(
                    f"The saved position is the end of epoch {epoch}, which was set: epoch"
                    f" {epoch + 1} begins instead. A loop of your own begins with that one.",
                    stacklevel=2,
                )
            position = _within(self._next[0], position)
        self._next = self.epoch, self.batches = position
        self._step = state.get("step", "")

    def steps(self, epoch: int | None = None, first: int = 0) -> Iterator[Step]:
        """The steps of an epoch, by default of this one, from ``first`` on."""
        epoch = self.epoch if epoch is None else epoch
        order = np.arange(len(self.lengths))
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(order))
        for number in range(first, len(order) // self.sequences):
            taken = np.sort(order[number * self.sequences :][: self.sequences])
            plan = plan_step(
                self.lengths[taken],
                ranks=self.ranks,
                micro_batches=self.micro_batches,
                no_empty=True,
                **self.options,
            )
            if len(plan.micro_batches[0]) > self.micro_batches:
                raise ValueError(
                    f"Step {number} of epoch {epoch} needs"
                    f" {len(plan.micro_batches[0])} micro-batches of max_tokens={plan.max_tokens}"
                    f" on a rank, more than micro_batches={self.micro_batches}. Raise one of them,"
                    f" or take fewer than sequences={self.sequences}."
                )
            names = taken.tolist()
            yield [[[names[i] for i in each] for each in rank] for rank in plan.micro_batches]


def _within(epoch: int, loaded: tuple[int, int] | None) -> tuple[int, int]:
    """A loaded position where it is in the epoch that was set, or that epoch's beginning.

    Raises:
        ValueError: the position is in a later epoch.
    """
    if loaded is None or loaded[0] < epoch:
        return epoch, 0
    if loaded[0] > epoch:
        raise ValueError(
            f"The saved position is in epoch {loaded[0]}, and set_epoch({epoch}) asks for an"
            " earlier one, as Accelerate's loaders do of themselves on a resumed run: call the"
            f" loader's set_epoch({loaded[0]}) before iterating, and so in every epoch."
        )
    return loaded


def _digest(content: bytes | Step) -> str:
    content = content if isinstance(content, bytes) else repr(content).encode()
    return hashlib.sha256(content).hexdigest()[:16]
