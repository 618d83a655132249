"""What one document takes on a pipeline, before anything is packed: the paper's T (Hydraulis B.2).

Short documents share a micro-batch with others, so they are counted as many that fill one, and
divided by their number. Nothing is known here of bubbles, of imbalance or of gathering parameters.

Cost: one prediction of a micro-batch for a length.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_wlb.plan import Recompute, Slice
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.sharding import choose

UTILISED = 4096
"""Tokens of a context rank with which its device is used well: shorter documents are packed."""


def document_ns(predictor: Predictor, tokens: int, mode: Recompute) -> float:
    """Forward and backward of a document on the stage that takes longest, in ns.

    Args:
        predictor: of the model on the pipeline's mesh.
        tokens: of the document.
        mode: what its micro-batch recomputes.
    """
    (time,) = documents_ns(predictor, tokens, (mode,))
    return time


def documents_ns(predictor: Predictor, tokens: int, modes: Sequence[Recompute]) -> list[float]:
    """:func:`document_ns` for several modes, in hardly more time than for one."""
    mesh = predictor.latency.mesh
    copies = max(UTILISED * mesh.context // tokens, 1)
    name, _ = choose([tokens] * copies, mesh.context, mesh.tensor, predictor.latency.segment_cost)
    slices = [Slice(number, 0, 0, tokens) for number in range(copies)]
    cost = predictor.micro_batch(slices, name)
    stages = {parts: stage for stage, parts in enumerate(predictor.memory.parts)}.values()
    costs = [cost._replace(recompute=mode) for mode in modes]
    return [
        max(sum(predictor.action_ns(stage, each)) for stage in stages) / copies for each in costs
    ]
