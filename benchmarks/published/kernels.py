"""The rate of published matrix products and memory-bound kernels, as the package predicts it.

A product has ``rows`` rows and a weight of ``inputs`` by ``outputs``: its time is that of a layer's
products (:class:`~lightning_wlb.cost.profile.LinearTable`). A memory-bound kernel runs at the
profile's rate of element-wise work: as it is where it is hand-written or compiled (``work`` is
``stream``), slowed down by ``eager_factor`` where it is one of torch's own (``eager``). Where its
time was published, ``bytes`` is the traffic that its reads and writes of whole tensors add up to.
"""

from __future__ import annotations

from benchmarks.published import Fact
from lightning_wlb.cost.profile import Profile


def predict(fact: Fact) -> float:
    """The product's TFLOP/s or milliseconds, or the GB/s of memory traffic."""
    profile = Profile.load(fact["profile"])
    if fact["work"] != "product":
        rate = profile.element_bytes_per_second
        if fact["work"] == "eager":
            rate /= profile.eager_factor
        return fact.number("bytes") / rate * 1e3 if fact.unit == "ms" else rate / 1e9
    rows = fact.number("rows")
    flops = 2 * rows * fact.number("inputs") * fact.number("outputs")
    seconds = profile.layer.seconds(flops, rows, backward=False)
    return {"ms": 1e3 * seconds, "TFLOP/s": flops / seconds / 1e12}[fact.unit]
