"""What one document takes on a pipeline, before anything is packed: the paper's T (Hydraulis B.2).

Short documents share a micro-batch with others, so they are counted as many that fill one, and
divided by their number. Nothing is known here of bubbles, of imbalance or of gathering parameters.

Cost: one prediction of a micro-batch for a length.
"""

from __future__ import annotations

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
    mesh = predictor.latency.mesh
    copies = max(UTILISED * mesh.context // tokens, 1)
    name, _ = choose([tokens] * copies, mesh.context, mesh.tensor, predictor.latency.segment_cost)
    slices = [Slice(number, 0, 0, tokens) for number in range(copies)]
    cost = predictor.micro_batch(slices, name)._replace(recompute=mode)
    stages = {parts: stage for stage, parts in enumerate(predictor.memory.parts)}.values()
    return max(sum(predictor.action_ns(stage, cost)) for stage in stages) / copies
