"""The rate of published matrix products and memory-bound kernels, as the package predicts it.

A product has ``rows`` rows and a weight of ``inputs`` by ``outputs``: its time is that of a layer's
products (:class:`~lightning_wlb.cost.profile.LinearTable`). A memory-bound kernel (``work`` is
``traffic``) runs at the profile's rate of element-wise work; where its time was published,
``bytes`` is the traffic that its reads and writes of whole tensors add up to.
"""

from __future__ import annotations

from benchmarks.published import Fact
from lightning_wlb.cost.profile import Profile


def predict(fact: Fact) -> float:
    """The product's TFLOP/s or milliseconds, or the GB/s of memory traffic."""
    profile = Profile.load(fact["profile"])
    if fact["work"] == "traffic":
        rate = profile.element_bytes_per_second
        return fact.number("bytes") / rate * 1e3 if fact.unit == "ms" else rate / 1e9
    rows = fact.number("rows")
    flops = 2 * rows * fact.number("inputs") * fact.number("outputs")
    seconds = profile.layer.seconds(flops, rows, backward=False)
    return {"ms": 1e3 * seconds, "TFLOP/s": flops / seconds / 1e12}[fact.unit]
