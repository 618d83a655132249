"""A batch sampler of equal work for any torch ``DataLoader``, and so for Lightning and Accelerate.

Every step takes the next ``sequences`` sequences of the epoch's order, whatever the number of
ranks, and :func:`.plan_step` decides, in about a millisecond, which rank runs which of them in
which micro-batch. So a loss divided by the whole step's tokens has one gradient under every plan.

Every iteration begins an epoch, as with torch's samplers: the epoch that ``set_epoch`` has named
last, or without it the next one. Only the first iteration after a loaded position goes on there.

Under a torchdata ``StatefulDataLoader`` the loader's state holds the position. Elsewhere
:meth:`BalancedBatchSampler.state_dict` counts the requested batches, and workers of a plain
``DataLoader`` request batches ahead of training. After a step's last batch a run may resume with
other numbers of ranks and micro-batches; after an epoch's last batch it resumes in the next epoch.
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
        rank: the rank whose micro-batches are yielded; None: micro-batches of all ranks in the
            order [micro-batch][rank], which Accelerate deals to its processes one by one.
        micro_batches: micro-batches of each rank in a step: the steps of gradient accumulation.
        seed: gives the order, which is new in each epoch.
        shuffle: whether the order is random; else sequences keep the data set's order.
        options: ``max_tokens``, ``model``, ``work`` (no list), ``lockstep`` of :func:`.plan_step`.

    Sequences at the end of an epoch that do not fill a step are left out.

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
        order = {"sequences": self.sequences, "seed": self.seed, "shuffle": self.shuffle}
        self._order = {"lengths": _digest(self.lengths.astype("<i8").tobytes()), **order}
        # The position: requested batches of the epoch, and the step of the last one.
        self.epoch, self.batches, self._step = 0, 0, ""
        # Where the next iteration begins, and whether set_epoch has named its epoch.
        self._next, self._is_set = (0, 0), False
        self._unset: set[int] = set()  # epochs that began unnamed, and were not left early

    def __len__(self) -> int:
        return len(self.lengths) // self.sequences * self._a_step

    def __iter__(self) -> Iterator[list[int]]:
        # This runs when the first batch is requested: loaders make iterators that they never use,
        # and Lightning sets the epoch after it has made the iterator.
        epoch, position = self._next
        # A StatefulDataLoader resumed at an epoch's end requests some batches from one iterator and
        # then uses another: the first one counts only if it reaches its last batch.
        if was_at_end := position >= len(self):
            epoch, position = self._next = epoch + 1, 0
        self.epoch = epoch
        self._unset |= set() if self._is_set else {epoch}
        steps = self.steps(epoch, position // self._a_step)
        if self.options.get("max_tokens") is not None:
            steps = iter(list(steps))  # a step that does not fit raises before the run begins
        for step in steps:
            own, digest = step if self.rank is None else [step[self.rank]], _digest(step)
            batches = [rank[k] for k in range(self.micro_batches) for rank in own]
            for batch in batches[position % self._a_step :]:
                if self.epoch != epoch:
                    raise _too_late(epoch, self.epoch)
                position += 1
                self.batches, self._step = position, digest
                if not was_at_end or position == len(self):
                    self._next = (self._next[0] if self._is_set else epoch + 1, 0)
                try:
                    yield batch
                except GeneratorExit:  # dropped, with all that was fetched
                    self._unset.discard(epoch)
                    raise

    @property
    def sampler(self) -> BalancedBatchSampler:
        """The batch sampler itself, as Lightning and Accelerate set the epoch of its sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Let iterations begin this epoch, whose order depends on the seed and its number.

        A loaded position from which no iteration has begun is kept if it is in this epoch. A
        position in an earlier epoch, which was left before its end, is dropped.

        Raises:
            ValueError: the loaded position is in a later epoch, or an earlier epoch began unset.
        """
        loaded = self._next if self._next[1] else None
        self._next = _within(whole("epoch", epoch, 0), loaded)
        self._is_set, (self.epoch, self.batches) = True, self._next
        begun, self._unset = self._unset, set()
        if min(begun, default=epoch) < epoch:
            raise _too_late(min(begun), epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch after the last requested batch, and what identifies the order.

        ``a_step`` is the number of batches of a step, ``step`` a digest of the begun step.
        """
        position = {"epoch": self.epoch, "batches": self.batches, "a_step": self._a_step}
        return {**position, "step": self._step, "order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where :meth:`state_dict` was taken.

        After a step's last batch the ranks, micro-batches and options may differ. After an epoch's
        last batch the next epoch begins; loops that set epochs must begin with it.

        Raises:
            ValueError: the position is inside a step that has other batches here, in another order,
                or in a later epoch than ``set_epoch`` has named for the iteration.
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
        """The steps of an epoch, by default the current one, from step ``first`` on."""
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
            if (needed := len(plan.micro_batches[0])) > self.micro_batches:
                raise ValueError(
                    f"Step {number} of epoch {epoch} needs {needed} micro-batches of"
                    f" max_tokens={plan.max_tokens} on a rank, more than micro_batches="
                    f"{self.micro_batches}. Raise one of them or lower sequences={self.sequences}."
                )
            yield [[taken[each].tolist() for each in rank] for rank in plan.micro_batches]


def _within(epoch: int, loaded: tuple[int, int] | None) -> tuple[int, int]:
    """A loaded position if it is in the epoch that was set, else that epoch's beginning."""
    if loaded is None or loaded[0] < epoch:
        return epoch, 0
    if loaded[0] > epoch:
        raise ValueError(
            f"The saved position is in epoch {loaded[0]}, and set_epoch({epoch}) asks for an"
            " earlier one, as Accelerate's loaders do of themselves on a resumed run: call the"
            f" loader's set_epoch({loaded[0]}) before iterating, and so in every epoch."
        )
    return loaded


def _too_late(requested: int, epoch: int) -> ValueError:
    return ValueError(
        f"set_epoch({epoch}) came when batches of epoch {requested} had been requested, for example"
        " by a loader's workers, which fetch ahead. Set each epoch before anything iterates: call"
        f" the sampler's set_epoch({epoch}) before Lightning's fit(ckpt_path=...), or set"
        " num_workers=0. Inside an epoch also load the state of a torchdata StatefulDataLoader."
    )


def _digest(content: bytes | Step) -> str:
    content = content if isinstance(content, bytes) else repr(content).encode()
    return hashlib.sha256(content).hexdigest()[:16]
