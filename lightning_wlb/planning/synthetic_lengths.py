"""Generator A: document lengths like those of long-context pretraining.

Lengths are log-normal, but one in a hundred is drawn from a Pareto tail; all are bounded by the
context window. The imbalance degree of the original packing on them is that of WLB-LLM's Table 2
(``benchmarks/results/packing.md``). Plan with them until the corpus's own lengths are at hand.

Cost: 20 ms for 300,000 documents.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

MEAN_LENGTH = 2600  # tokens; the generator's mean, for `documents_for`


def generator_a(documents: int, window: int, seed: int) -> npt.NDArray[np.int64]:
    """Lengths (int64, tokens) of ``documents`` documents between 32 tokens and ``window``."""
    rng = np.random.default_rng(seed)
    body = np.exp(rng.normal(6.8, 1.2, documents))
    is_tail = rng.random(documents) < 0.01
    uniform = rng.random(documents)
    tail = 8192.0 * (1.0 - uniform) ** (-1.0 / 0.3)
    # Bounded before the cast: the tail has lengths beyond the range of int64.
    length = np.minimum(np.where(is_tail, tail, body), float(window)).astype(np.int64)
    return np.maximum(length, 32)


def documents_for(steps: int, micro_batches: int, window: int) -> int:
    """Documents of Generator A that are enough for ``steps`` steps of N·C tokens."""
    return math.ceil(1.2 * steps * micro_batches * window / MEAN_LENGTH)
