"""A closed form of the step time on a mesh: it prunes meshes, and must not choose between them.

Of a sample of global batches it takes the tokens, the attention of all pieces (from the profile,
summed once for each tensor-parallel size) and the longest piece. On a mesh, with M micro-batches
for each replica of equal tokens and equal work, a step takes

    (M·V + P - 1) · a + 2·(P - 1) · message + gathering and reducing parameters

where a is forward and backward of one micro-batch on the slowest of the V·P stages: matrix products
at the profile's rate for so many rows, communication over tensor- and context-parallel ranks, an
even share of the attention. A replica never takes less than its longest piece, unless the packing
shares pieces between replicas. M is tried at 1, 2, 4 and 8 times the least number that the cap
allows, and activation checkpointing is the least with which the micro-batches that are open at once
fit, at the largest M the least hard.

What it leaves out is what planning decides: how even micro-batches become. So among good meshes its
order says next to nothing (rank correlation about 0), but what it finds slow is slow.

Cost: 1 to 2 ms for a mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.cost.memory import StageParts
from lightning_wlb.mesh import Mesh
from lightning_wlb.meshes.request import MeshRequest
from lightning_wlb.planning.planner import arrivals_of
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import MicroBatchCost
from lightning_wlb.schedule.programs import SCHEDULES

MULTIPLES = (1, 2, 4, 8)
"""Numbers of micro-batches that are tried, over the least."""

SLICING = ("auto", "slim")
"""Packings that cut pieces into slices and share pieces between replicas."""


class Estimate(NamedTuple):
    """What the closed form says of a mesh.

    Attributes:
        step_ns: of a step; 0 where nothing fits.
        recompute: activation checkpointing.
        state_bytes: parameters, gradients and optimizer state of the fullest rank.
    """

    step_ns: int
    recompute: str
    state_bytes: int


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """Estimates steps of a request on any mesh."""

    request: MeshRequest

    def estimate(self, mesh: Mesh) -> Estimate:
        """The fastest step over numbers of micro-batches and modes that fit."""
        request = self.request
        predictors = [request.predictor(mesh, mode) for mode in request.modes]
        state = max(predictors[0].memory.state_bytes)
        best = Estimate(0, request.modes[-1], state)
        if state > request.usable_bytes:
            return best
        for count in self._counts(mesh):
            rows = self._rows(mesh, count)
            for mode, predictor in zip(request.modes, predictors, strict=True):
                if self._fits(predictor, rows, count):
                    step = self._step_ns(predictor, rows, count)
                    if best.step_ns == 0 or step < best.step_ns:
                        best = Estimate(step, mode, state)
                    break
        return best

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
    def _up_to(self) -> NDArray[np.int64]:
        """Tokens of so many of the shortest pieces together."""
        return np.concatenate(([0], np.cumsum(self._all)))

    @property
    def _step_tokens(self) -> int:
        return int(self._up_to[-1]) // len(self._pieces)

    def _counts(self, mesh: Mesh) -> Iterator[int]:
        """Numbers of micro-batches of a replica."""
        least = -(-self._step_tokens // (mesh.data * self.request.data.token_cap))
        for multiple in MULTIPLES if self._slices(mesh) else MULTIPLES[:1]:
            yield multiple * least

    def _slices(self, mesh: Mesh) -> bool:
        return (
            self.request.data.packing_choice.method in SLICING
            and SCHEDULES[self.request.schedule_of(mesh)].slices
        )

    def _rows(self, mesh: Mesh, count: int) -> int:
        rows = -(-self._step_tokens // (mesh.data * count * mesh.context))
        return -(-rows // mesh.tensor) * mesh.tensor

    def _fits(self, predictor: Predictor, rows: int, count: int) -> bool:
        """Whether as many equal micro-batches as 1F1B opens fit on the first and last ranks."""
        memory, mesh = predictor.memory, predictor.latency.mesh
        ranks, virtual = mesh.pipeline, mesh.virtual_stages
        opened = -(-((virtual + 1) * ranks - 1) // virtual) if virtual > 1 else ranks
        return all(
            memory.model.rank_bytes(parts, min(most, count), rows, count)
            <= self.request.usable_bytes
            for parts, most in ((memory.rank_parts[0], opened), (memory.rank_parts[-1], 1))
        )

    def _step_ns(self, predictor: Predictor, rows: int, count: int) -> int:
        latency, mesh = predictor.latency, predictor.latency.mesh
        cost = self._cost(predictor, rows, count)
        kinds: dict[StageParts, int] = {
            parts: stage for stage, parts in enumerate(predictor.memory.parts)
        }
        action = max(sum(predictor.action_ns(stage, cost)) for stage in kinds.values())
        ranks, virtual = mesh.pipeline, mesh.virtual_stages
        busy = count * virtual * action
        if not (self._slices(mesh) and virtual == 1):
            # The longest piece runs on one replica, in one micro-batch where it is not sliced.
            longest = self._longest_ns(predictor) * virtual
            busy = max(busy, longest)
            if not self._slices(mesh):
                action = max(action, longest // virtual)
        messages = 2 * (ranks - 1) * latency.pipeline_ns(rows, 0)
        return busy + (ranks - 1) * action + messages + predictor.synchronisation_ns

    def _cost(self, predictor: Predictor, rows: int, count: int) -> MicroBatchCost:
        """A micro-batch with an even share of everything."""
        latency, mesh = predictor.latency, predictor.latency.mesh
        shares = len(self._pieces) * mesh.data * count * mesh.context
        # Pieces longer than a rank's rows are on several ranks, which exchange their keys.
        alone, whole = self._up_to[np.searchsorted(self._all, rows, side="right")], self._up_to[-1]
        travelling = (mesh.context - 1) * rows * int(whole - alone) // int(whole)
        layers = []
        for number, kind in enumerate(latency.kinds):
            layer = [
                self._attention(predictor)[number][backward] // shares
                + kind.linear_ns(rows, backward=backward)
                + kind.tensor_parallel_ns(rows, backward=backward)
                + kind.context_parallel_ns(travelling, rows + travelling, backward=backward)
                for backward in (False, True)
            ]
            layers.append((layer[0], layer[1]))
        return _cost_of(rows, tuple(layers))

    def _longest_ns(self, predictor: Predictor) -> int:
        """The longest piece alone, forward and backward, on the slowest stage."""
        latency, longest = predictor.latency, self._all[-1:]
        ranks = latency.mesh.context
        rows = -(-int(longest[0]) // ranks)
        layers = []
        for kind in latency.kinds:
            layer = [
                kind.attention_ns(longest, longest, backward=backward) // ranks
                + kind.linear_ns(rows, backward=backward)
                for backward in (False, True)
            ]
            layers.append((layer[0], layer[1]))
        cost = _cost_of(rows, tuple(layers))
        return sum(predictor.action_ns(len(predictor.stages) // 2, cost))

    @cached_property
    def _attention_ns(self) -> dict[tuple[int, str], list[tuple[int, int]]]:
        return {}

    def _attention(self, predictor: Predictor) -> list[tuple[int, int]]:
        """Of a layer of each kind, forward and backward of all pieces on one rank."""
        latency = predictor.latency
        key = latency.mesh.tensor, latency.activation_checkpointing
        if key not in self._attention_ns:
            self._attention_ns[key] = [
                (
                    kind.attention_ns(self._all, self._all, backward=False),
                    kind.attention_ns(self._all, self._all, backward=True),
                )
                for kind in latency.kinds
            ]
        return self._attention_ns[key]


def _cost_of(rows: int, layer_ns: tuple[tuple[int, int], ...]) -> MicroBatchCost:
    """Only rows and times of layers: what :meth:`.Predictor.action_ns` reads."""
    return MicroBatchCost(rows, rows, 0, 0, (0, 0), (0.0, 0.0), layer_ns)
