"""A closed form of the step time on a mesh, good enough to prune meshes but not to choose one.

From a sample of global batches it uses the tokens, the attention of all pieces (by the profile,
summed once for each tensor-parallel size) and the longest piece. With M micro-batches of equal
tokens and equal work on each replica, a step takes

    M · r + f + 2·(P - 1) · message

where r is the time of forward and backward of one micro-batch on all stages of the busiest rank. f
is the time in which the pipeline fills and drains: forward and backward on all stages but the
slowest, divided by the stages of a rank. Both count matrix products at the profile's rate for so
many rows, communication over tensor- and context-parallel ranks, and an even share of the
attention. A replica never takes less than its longest piece, unless the packing shares pieces
between replicas. M is 1, 2, 4 and 8 times the least number that the cap allows. All micro-batches
recompute as little as fits in memory, with as many open as 1F1B opens.

The closed form does not know how even planned micro-batches are: on the settings of
``benchmarks/results/meshes.json`` the best known mesh is among its first thirteen, in most among
the first six. Without the larger M, the longest piece or f, it is further behind. Without the keys
of shared pieces that of 7B on 1,024 GPUs (128K) would be the thirty-first, not the sixth.

Cost: about 2 ms for a mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.plan import Recompute
from lightning_wlb.planning.dp_merge import Dealing, most_sharers
from lightning_wlb.planning.planner import arrivals_of
from lightning_wlb.prediction.micro_batch import (
    MicroBatchCost,
    exchange_ns,
    modes_of,
    times_by_mode,
)
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.sharding.integer_ranges import Integers

MULTIPLES = (1, 2, 4, 8)
"""Numbers of micro-batches that are tried, as multiples of the least."""

SLICING = ("auto", "slim")
"""Packings that cut pieces into slices and share pieces between replicas."""


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """Estimates steps of a request on any mesh."""

    request: MeshRequest
    _by_tensor: dict[int, Integers] = field(default_factory=dict, init=False)
    _by_sharers: dict[tuple[int, int], Integers] = field(default_factory=dict, init=False)

    def step_ns(self, mesh: Mesh) -> int:
        """The fastest step over the numbers of micro-batches that fit; 0 if none fits."""
        predictor = self.request.predictor(mesh)
        if max(predictor.memory.state_bytes) > predictor.usable_bytes:
            return 0
        least = -(-self._step_tokens // (mesh.data * self.request.data.token_cap))
        multiples = MULTIPLES if self._slices else MULTIPLES[:1]
        steps = (self._least_ns(predictor, multiple * least) for multiple in multiples)
        return min(filter(None, steps), default=0)

    def _least_ns(self, predictor: Predictor, count: int) -> int:
        """Time of a step of ``count`` micro-batches with the least recomputation; 0: none fits."""
        mesh = predictor.latency.mesh
        rows = -(-self._step_tokens // (mesh.data * count * mesh.context))
        rows = -(-rows // mesh.tensor) * mesh.tensor
        for mode in modes_of(self.request.activation_checkpointing):
            if self._held(predictor, rows, count, mode) <= predictor.usable_bytes:
                return self._step_ns(predictor, rows, count, mode)
        return 0

    @cached_property
    def _pieces(self) -> list[NDArray[np.int64]]:
        """Tokens of the pieces of the first global batches."""
        request, data = self.request, self.request.data
        lengths = request.lengths
        if data.long_documents == "truncate":
            lengths = np.minimum(lengths, data.context_window)
        batches = arrivals_of(lengths, data, request.mixture)
        drawn = (batches.draw(step) or [] for step in range(request.steps))
        return [
            np.array([piece.tokens for piece in pieces], np.int64) for pieces in drawn if pieces
        ]

    @cached_property
    def _all(self) -> NDArray[np.int64]:
        """Tokens of all these pieces, longest last."""
        return np.sort(np.concatenate(self._pieces))

    @cached_property
    def _step_tokens(self) -> int:
        return int(self._all.sum()) // len(self._pieces)

    @property
    def _slices(self) -> bool:
        return self.request.data.packing_choice.method in SLICING

    def _sharers(self, mesh: Mesh) -> Integers:
        """How many replicas share each of all pieces; virtual stages cannot run shared pieces."""
        work, shares = Work.of(self.request.shape), self._slices and mesh.virtual_stages == 1
        most = most_sharers(work, mesh) if shares else 1
        if (key := (mesh.data, most)) not in self._by_sharers:
            size = Dealing((), mesh.data, work.total, per_capacity=1, sharers=most).size
            works = list(map(work.total, self._all.tolist()))
            total = sum(works) // len(self._pieces)
            sizes = [size(*each, total) for each in zip(self._all, works, strict=True)]
            self._by_sharers[key] = np.array(sizes)
        return self._by_sharers[key]

    def _held(self, predictor: Predictor, rows: int, count: int, mode: Recompute) -> int:
        """Bytes of the fuller of first and last rank, with as many open micro-batches as 1F1B."""
        memory, mesh = predictor.memory, predictor.latency.mesh
        ranks, virtual = mesh.pipeline, mesh.virtual_stages
        opened = -(-((virtual + 1) * ranks - 1) // virtual) if virtual > 1 else ranks
        return max(
            memory.model.rank_bytes(parts, min(most, count), rows, count, mode)
            for parts, most in ((memory.rank_parts[0], opened), (memory.rank_parts[-1], 1))
        )

    def _step_ns(self, predictor: Predictor, rows: int, count: int, mode: Recompute) -> int:
        mesh, slices = predictor.latency.mesh, self._slices
        stages = self._even_ns(predictor, rows, count, mode)
        busy, filling = count * _busiest(stages, mesh), _filling(stages, mesh)
        if not (slices and mesh.virtual_stages == 1):
            # The longest piece runs on one replica, and if it is not sliced in one micro-batch.
            stages = self._longest_ns(predictor)
            busy = max(busy, _busiest(stages, mesh))
            filling = filling if slices else max(filling, _filling(stages, mesh))
        return busy + filling + 2 * (mesh.pipeline - 1) * predictor.latency.pipeline_ns(rows, 0)

    def _even_ns(self, predictor: Predictor, rows: int, count: int, mode: Recompute) -> list[int]:
        """Time on each stage of a micro-batch with an even share of everything."""
        latency, mesh = predictor.latency, predictor.latency.mesh
        sharers = self._sharers(mesh)
        ranks = len(self._pieces) * mesh.data * count * mesh.context
        attention = self._attention(latency) // ranks
        # Pieces longer than a rank's rows lie on several ranks, which exchange their keys.
        sent = self._all * (sharers * mesh.context - 1)
        own = int(sent[(sharers == 1) & (self._all > rows)].sum()) // ranks
        shared = int(sent[sharers > 1].sum()) // ranks
        part = min(int(self._all[sharers > 1].sum()) // ranks, rows)  # rows of shared pieces
        read = rows + own if mesh.context > 1 else 0
        exchange = exchange_ns(latency, [rows - part], [own], [[read]], [1])
        if shared:
            exchange += exchange_ns(latency, [part], [shared], [[shared]], [int(sharers.max())])
        return _stage_ns(predictor, rows, attention, exchange, mode)

    def _longest_ns(self, predictor: Predictor) -> list[int]:
        """Time on each stage of the longest piece as a micro-batch."""
        latency, longest = predictor.latency, self._all[-1:]
        ranks = latency.mesh.context
        attention = [kind.attention_ns(longest, longest) for kind in latency.kinds]
        rows = -(-int(longest[0]) // ranks)
        nothing = exchange_ns(latency, [rows], [0], [[0]], [1])
        return _stage_ns(predictor, rows, np.array(attention).T // ranks, nothing, "none")

    def _attention(self, latency: LatencyModel) -> Integers:
        """Attention of all pieces on one rank in ns, int64 [2 (pass), kinds of layers]."""
        tensor = latency.mesh.tensor
        if tensor not in self._by_tensor:
            times = [kind.attention_ns(self._all, self._all) for kind in latency.kinds]
            self._by_tensor[tensor] = np.array(times).T
        return self._by_tensor[tensor]


def _stage_ns(
    predictor: Predictor, rows: int, attention: Integers, exchange: Integers, mode: Recompute
) -> list[int]:
    """Forward and backward time of a micro-batch on each stage, virtual stages in order.

    Args:
        rows: tokens on each rank.
        attention: time of each kind of layer on a rank, int64 [2 (pass), kinds].
        exchange: time in which ranks join keys, as from :func:`.exchange_ns`.
    """
    (by_mode,) = times_by_mode(predictor.latency, [rows], attention[:, :, None, None], exchange)
    cost = MicroBatchCost(rows, rows, 0, 0, by_mode, mode)
    return [
        sum(there + back) for there, back in zip(*predictor.stage_durations([cost]), strict=True)
    ]


def _busiest(stage_ns: list[int], mesh: Mesh) -> int:
    """The time of the busiest rank, which has every ``pipeline``-th stage."""
    return max(sum(stage_ns[rank :: mesh.pipeline]) for rank in range(mesh.pipeline))


def _filling(stage_ns: list[int], mesh: Mesh) -> int:
    """The time in which the pipeline fills and drains."""
    return (sum(stage_ns) - max(stage_ns)) // mesh.virtual_stages
