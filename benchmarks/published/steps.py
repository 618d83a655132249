"""What the package predicts of published facts of this class."""

from __future__ import annotations

from benchmarks.published import Fact


def predict(fact: Fact) -> float:
    """The fact's figure as predicted, in its unit."""
    raise NotImplementedError(fact)
