"""Steps of Generator A and the plans that benchmarks/slimpack.py compares, as their actions.

Work is that of one layer of LLaMA2-7B, the pipeline has :data:`RANKS` ranks, messages take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.workloads import REFERENCE_WORK, documents_for, generator_a, window_pieces
from lightning_wlb.plan import Piece, ReplicaPlan, Slice
from lightning_wlb.planning.packing.wlb import pack as longest_first
from lightning_wlb.planning.replicas import replica_plan, whole
from lightning_wlb.planning.slicing import PrefixWork
from lightning_wlb.schedule.actions import FORWARD, Action
from lightning_wlb.schedule.packflow import backward_order, packflow
from lightning_wlb.schedule.simulate import simulate

RANKS = 4
TOTAL = PrefixWork.of(REFERENCE_WORK.total)
PASSES = (PrefixWork.of(REFERENCE_WORK.forward), PrefixWork.of(REFERENCE_WORK.backward))
MULTIPLES = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)  # of N: micro-batches of unsliced plans


def work_of(slices: Sequence[Slice]) -> tuple[int, int]:
    """Forward and backward work of a micro-batch."""
    return (
        sum(REFERENCE_WORK.forward(part.tokens, part.context) for part in slices),
        sum(REFERENCE_WORK.backward(part.tokens, part.context) for part in slices),
    )


@dataclass
class Step:
    """One replica's step as its actions: work of each micro-batch, and the order of backwards.

    ``work`` is what the step's length is divided by.
    """

    forward: list[int]
    backward: list[int]
    order: list[int]
    needs: list[int]
    tokens: list[int]
    work: int

    @classmethod
    def of(cls, replica: ReplicaPlan) -> Step:
        groups = [replica.slices_of(group) for group in replica.forward]
        work = [work_of(group) for group in groups]
        order, needs = backward_order(replica)
        tokens = list(map(replica.tokens_of, replica.forward))
        forward, backward = [f for f, _ in work], [b for _, b in work]
        return cls(forward, backward, order, needs, tokens, sum(forward) + sum(backward))

    @property
    def imbalance(self) -> tuple[float, float, float]:
        """max·M/Σ of forward and backward together, forward, backward."""
        both = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        return tuple(  # type: ignore[return-value]
            max(loads) * len(loads) / sum(loads) for loads in (both, self.forward, self.backward)
        )

    def simulate(self, per_rank: int = 1, overhead: int = 0) -> tuple[float, int]:
        """The step's length over its work, and the most tokens open on a rank."""
        programs = [
            packflow(rank, RANKS, self.order, self.needs, per_rank) for rank in range(RANKS)
        ]

        def duration(action: Action) -> int:
            loads = self.forward if action.kind == FORWARD else self.backward
            return loads[action.micro_batch] // per_rank + overhead

        result = simulate(
            programs, duration, opened_bytes=lambda action: self.tokens[action.micro_batch]
        )
        return result.total_ns / self.work, max(result.peak_bytes) // per_rank


def stream_of(count: int, window: int, steps: int, seed: int) -> np.ndarray:
    """Lengths of the pieces of so many steps of ``count`` windows."""
    return window_pieces(generator_a(documents_for(steps, count, window), window, seed), window)


def steps_of(lengths: np.ndarray, tokens: int, steps: int) -> list[list[Piece]]:
    """Global batches of exactly ``tokens`` tokens."""
    result: list[list[Piece]] = []
    at = 0
    for number in range(steps):
        batch: list[Piece] = []
        filled = 0
        while filled < tokens:
            batch.append(Piece(at, 0, int(lengths[at]), number))
            filled += batch[-1].tokens
            at += 1
        result.append(batch)
    return result


def shard(slices: Sequence[Slice], replicas: int) -> tuple[str, int]:
    return "per_sequence", sum(part.tokens for part in slices)


def whole_pieces(groups: Sequence[Sequence[Piece]]) -> ReplicaPlan:
    return replica_plan([[whole(piece) for piece in g] for g in groups if g], 0, shard)


def unsliced(pieces: list[Piece], count: int, window: int) -> list[Step]:
    """Whole-piece plans of the same pieces: M from N to 8·N, caps of C and 1.5·C."""
    steps = []
    for multiple in MULTIPLES:
        for cap in (window, window * 3 // 2):
            groups, carried = longest_first(pieces, int(multiple * count), cap, TOTAL)
            if not carried:
                steps.append(Step.of(whole_pieces(groups)))
    return steps


def original(pieces: list[Piece], window: int) -> ReplicaPlan:
    groups: list[list[Piece]] = [[]]
    for piece in pieces:
        if sum(other.tokens for other in groups[-1]) == window:
            groups.append([])
        groups[-1].append(piece)
    return whole_pieces(groups)


def whole_packs(forward: list[list[Slice]], backward: list[list[Slice]]) -> Step:
    """Asymmetric packs as single actions."""
    last = {(part.document, part.origin): at for at, pack in enumerate(forward) for part in pack}
    count = len(forward)
    needs = [
        max([at, *(last[part.document, part.origin] for part in pack)]) + 1
        for at, pack in enumerate(backward)
    ]
    needs += range(len(needs) + 1, count + 1)
    forward_loads = [work_of(pack)[0] for pack in forward]
    backward_loads = [work_of(pack)[1] for pack in backward] + [0] * (count - len(backward))
    return Step(
        forward_loads,
        backward_loads,
        list(range(count)),
        needs,
        [sum(part.tokens for part in pack) for pack in forward],
        sum(forward_loads) + sum(backward_loads),
    )
