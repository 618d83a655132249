"""Plans for Megatron Core's two schedulers of packed sequences, behind their interfaces.

``DpBalancedScheduler`` fills micro-batches in the order in which sequences come and deals them in
turn; ``BalancedCPScheduler`` (hybrid or *dynamic context parallelism*) puts a long sequence on as
many ranks as its length requires, and counts pairs only. The classes here replace the one method
that schedules; rerouting, packing and running stay Megatron's::

    from megatron.core.datasets.data_schedule import DpBalancedScheduler

    class Scheduler(PlannedPacking, DpBalancedScheduler):
        model = "7b"

    wrapper.cp_balancing_scheduler = PlannedContextParallel(max_seq_len, dp_cp_group, model="7b")

With dynamic groups, a sequence runs on one rank, or on an aligned power-of-two set of ranks: as
many as can hold it, or as its share of the step's work requires
(:mod:`lightning_wlb.planning.dp_merge`). All ranks run shared sequences before their own, in
descending size of the sets, so ranks cannot deadlock, and a step is one group without barriers. As
in Megatron, this needs a pipeline of one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_wlb.adapters.plan_step import plan_step, shape_of
from lightning_wlb.cost.flops import Work
from lightning_wlb.plan import Piece
from lightning_wlb.planning.dp_merge import Dealing, Merged

SHARED_ABOVE = (0, 1, 2, 4, 8)
"""Values tried for ``per_capacity`` of :class:`.Dealing`; 0 shares no piece because of its work."""

Samples = Sequence[tuple[int, int]]  # (number, tokens)


class PlannedPacking:
    """Put before ``DpBalancedScheduler``: packed micro-batches of equal work under its cap.

    Attributes:
        model: as for :func:`.plan_step`.
        lockstep: whether replicas wait for each other in every micro-batch.
    """

    model: Any = None
    lockstep: bool = False

    def get_groups_and_subsamples(self: Any, sample_id_seqlens: Samples) -> list[list[list[int]]]:
        """Numbers of the sequences of each micro-batch and rank, [micro-batch][data × context].

        Raises:
            ValueError: no model, a sequence above the cap, fewer sequences than micro-batches, or
                ``max_num_seqs``, which this scheduler does not support.
        """
        if getattr(self, "max_num_seqs", None) is not None:
            raise ValueError("PlannedPacking knows no max_num_seqs: leave it out.")
        multiple, needed, step = self.microbatch_group_size_per_vp_stage or 1, 1, None
        while step is None or needed % multiple:
            step = plan_step(
                [tokens for _, tokens in sample_id_seqlens],
                ranks=self.dp_size,
                max_tokens=self.max_seqlen_per_dp_cp_rank * self.cp_size,
                model=self.model,
                micro_batches=-(-needed // multiple) * multiple,
                lockstep=self.lockstep,
                no_empty=True,
            )
            needed = len(step.micro_batches[0])
        if not all(map(all, step.micro_batches)):
            raise ValueError(
                f"{len(sample_id_seqlens)} sequences do not fill {needed} micro-batches of"
                f" {self.dp_size} replicas. Take more sequences in a step."
            )
        number = [identity for identity, _ in sample_id_seqlens]
        return [
            [
                [number[i] for i in rank[k]]
                for rank in step.micro_batches
                for _ in range(self.cp_size)
            ]
            for k in range(needed)
        ]


class PlannedContextParallel:
    """Replaces ``BalancedCPScheduler``: a sequence runs on one rank, or on several together.

    Args:
        max_seq_len_per_rank: most tokens of a sequence on each rank that runs it.
        dp_cp_group: group of the data × context parallel ranks; only its size is used.
        model: as for :func:`.plan_step`.
    """

    def __init__(self, max_seq_len_per_rank: int, dp_cp_group: Any, model: Any = None) -> None:
        self.max_seq_len_per_rank = max_seq_len_per_rank
        self.total_hdp_gpus: int = dp_cp_group.size()
        self.work = None if model is None else Work.of(shape_of(model)).total

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Samples, config: Any = None
    ) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """Tokens and numbers of the sequences, [group][rank], of a step in one group.

        Raises:
            ValueError: no model, a sequence too long for all ranks, or too few to share among them.
        """
        if self.work is None:
            raise ValueError("PlannedContextParallel needs model=, such as '7b', or a config.")
        ranks, cap = self.total_hdp_gpus, self.max_seq_len_per_rank
        most = 1 << (ranks.bit_length() - 1)
        identity, tokens = max(sample_id_seqlens, key=lambda each: each[1])
        if tokens > cap * most:
            raise ValueError(
                f"Sequence {identity} has {tokens} tokens, more than {cap} on each of {most} of"
                f" {ranks} ranks (a power of two). Raise max_seqlen_per_dp_cp_rank."
            )
        pieces = [Piece(number, 0, tokens, 0) for number, tokens in sample_id_seqlens]
        found: list[Merged] = []
        for threshold in SHARED_ABOVE:
            merged = Dealing(pieces, ranks, self.work, threshold, cap).merged
            if all(merged.loads):
                found.append(merged)
        if not found:
            raise ValueError(
                f"{len(pieces)} sequences leave some of {ranks} ranks idle: give more."
            )
        best = min(found, key=lambda merged: max(merged.loads))
        own = [
            [piece for piece, members in best.shared if rank in members] + best.own[rank]
            for rank in range(ranks)
        ]
        lengths = [[piece.tokens for piece in each] for each in own]
        return [lengths], [[[piece.document for piece in each] for each in own]]
