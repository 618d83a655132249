"""The interface of every packing method: what it is given, and what it decides.

A :class:`Packer` lives as long as a run and holds the pieces that wait between steps. Its work is
split in two, because a run may move to another mesh and must see the same data:

* :meth:`Packer.next_step` decides which pieces enter a step and, for methods that keep pieces
  whole, which of them form a micro-batch. It knows the :class:`Rules` only.
* :meth:`Packer.replicas` decides which replica runs what, and in which order. It knows the mesh.
  Methods that slice pieces form their micro-batches only here.

The state of a method is the pieces that wait, and the few integers that it adds.

Cost: the method's own; the base adds only a sort of the waiting pieces in drain steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.cost.flops import Work
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece, ReplicaPlan
from lightning_wlb.planning.dealing import Deal, heaviest_first
from lightning_wlb.planning.global_batches import GlobalBatches
from lightning_wlb.planning.plan_scoring import Placement, WorkScorer
from lightning_wlb.planning.replica_plans import replica_plan, whole_slice
from lightning_wlb.planning.tuning import ACTION_OVERHEAD

MicroBatches = list[list[Piece]]
"""The pieces of each micro-batch."""


@dataclass(frozen=True)
class PackingOptions:
    """Options of one packing method; a value out of range raises ValueError, with the remedy."""

    decide_data: ClassVar[tuple[str, ...]] = ()
    """Options that change which pieces enter a step: a run resumes only with the same values."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The options that a resumed run must share, in plain types."""
        given = asdict(self)
        return {name: given[name] for name in self.decide_data}


@dataclass(frozen=True)
class Rules:
    """The data settings, resolved, as a packing method sees them."""

    #: int64 [documents], tokens of each document of the store, after truncation
    lengths: NDArray[np.int64]
    window: int  #: C, tokens of the longest piece
    micro_batches: int  #: N, micro-batches of a global batch over all replicas
    cap: int  #: most tokens of a micro-batch
    work: Work  #: forward and backward work of the model
    options: Any  #: an instance of the method's :attr:`Packer.Options`
    cap_is_given: bool = True  #: whether the user gave the cap; then it holds even if more fits

    def work_scorer(self, mesh: Mesh) -> WorkScorer:
        """The scorer by exact work, for planners without a device profile."""
        stages, each = mesh.pipeline, mesh.virtual_stages
        # Stage passes that are open on the first rank in 1F1B, plain or interleaved.
        most_open = stages if each == 1 else (each + 1) * stages - 1
        overhead = self.work.forward(max(self.window // ACTION_OVERHEAD, 1))
        return WorkScorer(self.work, mesh, overhead, most_open * self.cap)


class Packer:
    """One packing method over a run; a subclass defines :meth:`.Packer.pack` or ``replicas``."""

    Options: ClassVar[type[PackingOptions]] = PackingOptions
    """Dataclass of the method's own options."""
    cuts_stream: ClassVar[bool] = False
    """Whether a global batch is the next N·C tokens of the documents, cut every C tokens."""
    compares_plans: ClassVar[bool] = False
    """Whether it tries several plans of a step and chooses with :attr:`.Placement.scorer`."""
    arranges: ClassVar[bool] = False
    """Whether micro-batches are made by :meth:`.Packer.replicas`, from all pieces of the step."""
    cap_percent: ClassVar[int] = 100
    """The cap where the user gives none, in percent of C."""
    deal: ClassVar[Deal] = heaviest_first
    """How whole micro-batches are dealt to the replicas."""
    max_age: int = sys.maxsize
    """Steps after which further micro-batches are opened for a carried piece."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.carried: list[Piece] = []  # did not fit their step; the first to enter the next
        self.thresholds: tuple[int, ...] = ()
        """Least tokens of a piece of each outlier queue; empty where there are none."""

    @property
    def held(self) -> list[Piece]:
        """Every piece that has arrived and not yet entered a step."""
        return list(self.carried)

    def reset(self) -> None:
        """Start an epoch, in which nothing waits."""
        self.carried = []

    def next_step(self, arrivals: GlobalBatches, step: int) -> tuple[MicroBatches, bool]:
        """The pieces of optimiser step ``step``, and whether it drains waiting pieces.

        Some micro-batches may be empty; if all are or there is none, the epoch is over. A method
        that slices pieces returns all of them in one micro-batch.
        """
        while (batch := arrivals.draw(step)) is not None:
            admitted = self.carried + self.admit(batch, step)
            if admitted:
                self.carried = []
                bins = self.rules.micro_batches
                return self._pack_in_time(admitted, step, bins, self.max_age), False
        held = self.held
        self.reset()
        bins = self.rules.micro_batches
        admitted, self.carried = oldest_first(held, bins * self.rules.window)
        return self._pack_in_time(admitted, step, bins, max_age=0), True

    def admit(self, batch: list[Piece], step: int) -> list[Piece]:
        """Let a global batch arrive; returns the pieces, new or waiting, that may enter a step."""
        return batch

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """Put ``pieces`` into ``bins`` micro-batches; returns these and the pieces left over.

        A method that needs the mesh to form micro-batches (``arranges``) returns a single one.
        """
        assert self.arranges, "a method that does not arrange packs"
        return [pieces], []

    def cap(self, place: Placement) -> int:
        """Most tokens of a micro-batch on a mesh."""
        return self.rules.cap

    def replicas(self, micro_batches: MicroBatches, place: Placement) -> list[ReplicaPlan]:
        """The plan of each replica. The base deals the micro-batches as they are, by ``deal``."""
        filled = [pieces for pieces in micro_batches if pieces]
        work = self.rules.work.total
        works = [sum(work(piece.tokens) for piece in pieces) for pieces in filled]
        return [
            replica_plan([list(map(whole_slice, filled[at])) for at in own], number, place.sharding)
            for number, own in enumerate(type(self).deal(works, place.mesh.data))
        ]

    def state_dict(self) -> dict[str, Any]:
        """The pieces that wait, in plain types."""
        return {"carried": list(map(list, self.carried))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self.carried = list(map(Piece._make, state["carried"]))

    def _pack_in_time(
        self, pieces: list[Piece], step: int, bins: int, max_age: int
    ) -> MicroBatches:
        """Pack, in up to twice as many micro-batches if pieces may wait no longer.

        A micro-batch holds only one piece of just above half a cap, so N micro-batches could hold
        fewer such pieces than arrive. With 2·N micro-batches, each at least half full if any piece
        is carried, a step takes as many tokens as arrive.
        """
        if not pieces:
            return []
        most = 2 * bins
        micro_batches, carried = self.pack(pieces, bins)
        while bins < most and any(step - piece.arrival >= max_age for piece in carried):
            bins += 1
            micro_batches, carried = self.pack(pieces, bins)
        self.carried = carried + self.carried
        return micro_batches


def oldest_first(held: Sequence[Piece], tokens: int) -> tuple[list[Piece], list[Piece]]:
    """The oldest pieces of at most ``tokens`` tokens together, but at least one, and the rest.

    Both lists are in order of (arrival, document, origin), whatever the order of ``held``.
    """
    order = sorted(held, key=lambda piece: (piece.arrival, piece.document, piece.origin))
    taken = 0
    for index, piece in enumerate(order):
        taken += piece.tokens
        if taken > tokens and index:
            return order[:index], order[index:]
    return order, []
