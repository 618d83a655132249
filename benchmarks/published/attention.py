"""The time of published calls of attention kernels, as the package predicts it.

Every call is causal and has ``documents`` equal segments of ``queries`` rows that see ``keys``
keys, aligned at the bottom right. A figure in TFLOP/s counts what its publication counts: 4 FLOPs
for each pair of a square's half, head and element of its width, 2.5 times that in a backward.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.published import Fact
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import LayerShape, ModelShape

WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}


def predict(fact: Fact) -> float:
    """The call's milliseconds, or its TFLOP/s."""
    head_dim = fact.number("head_dim")
    layer = LayerShape(
        heads=fact.number("heads"),
        kv_heads=fact.number("kv_heads"),
        head_dim=head_dim,
        value_dim=fact.number("value_dim", head_dim),
        attention_parameters=1,
        feed_forward_parameters=1,
        sliding_window=fact.number("window", 0) or None,
    )
    # The kernel alone, not in a whole step.
    alone = replace(Profile.load(fact["profile"]), sustained=1.0)
    model = LatencyModel(alone, ModelShape.of_layers(layer.heads, 1, [layer]))
    documents, queries, keys = (fact.number(name) for name in ("documents", "queries", "keys"))
    forward, backward = model.attention_ns(np.full(documents, queries), np.full(documents, keys))
    ns = {"forward": forward, "backward": backward, "both": forward + backward}[fact["pass"]]
    if fact.unit == "ms":
        return ns / 1e6
    assert queries == keys, fact
    flops = 2 * documents * queries**2 * layer.heads * (layer.head_dim + layer.value_dim) / 2
    return WORK[fact["pass"]] * flops / (ns * 1e3)
