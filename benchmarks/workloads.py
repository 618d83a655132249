"""The workloads that every benchmark uses, so that figures compare.

* Generator A: the document lengths of long-context pretraining, log-normal with a Pareto tail
  (lightning_wlb/planning/synthetic_lengths.py).
* The standard library: sizes of Python's own source files, one byte one token, read from the
  committed ``stdlib_lengths.json`` (``python -m benchmarks.workloads`` measures this Python's
  and writes the file).
* Corpora of SlimPack's settings (§6), whose lengths are not published: mixtures of a log-normal
  body and a Pareto tail with what its §2 says of them (about 80 % of documents below 4K tokens, 1 %
  of them half of the work, GitHub longer than the others, Wikipedia in two clusters), bounded by
  the window; and its models.
* The reference cost: one layer of LLaMA2-7B, without the output projection, so that attention
  over d tokens costs d²/49,408 token-equivalents forward and d²/42,350 forward and backward.
"""

from __future__ import annotations

import json
import math
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.planning.global_batches import StreamPosition, next_pieces
from lightning_wlb.planning.synthetic_lengths import documents_for, generator_a

__all__ = ["documents_for", "generator_a", "stdlib_lengths", "window_pieces"]

STDLIB_FILE = Path(__file__).with_name("stdlib_lengths.json")

LLAMA2_7B_LAYER = ModelShape(
    dim=4096, layers=1, heads=32, kv_heads=32, head_dim=128, ffn_dim=11008, vocab_size=0
)
REFERENCE_WORK = Work.of(LLAMA2_7B_LAYER)

CALIBRATION_DOCUMENTS = 300_000


K = 1024

SHAPES = {  # the paper's Table 3; its vocabulary is not in the text, LLaMA2's is taken
    "7B": ModelShape(4096, 32, 32, 32, 128, 11_008, 32_000),
    "13B": ModelShape(5120, 40, 40, 40, 128, 13_824, 32_000),
    "70B": ModelShape(8192, 80, 64, 8, 128, 28_672, 32_000),
    "150B": ModelShape(12_288, 96, 96, 8, 128, 32_768, 32_000),
}


@dataclass(frozen=True)
class Corpus:
    """Document lengths in tokens: a log-normal body, and a share of others.

    Args:
        median: of the body.
        sigma: of the body's logarithm.
        tail: share of documents that are not of the body.
        scale: their least (Pareto) or median (log-normal) length.
        shape: their Pareto exponent, or 0 for a second log-normal with the same sigma.
    """

    median: float
    sigma: float
    tail: float
    scale: float
    shape: float

    def lengths(self, count: int, window: int, seed: int) -> np.ndarray:
        """Lengths of ``count`` documents, at least 16 and at most ``window`` tokens."""
        rng = np.random.default_rng(seed)
        body = self.median * np.exp(rng.normal(0, self.sigma, count))
        if self.shape:
            other = self.scale * (1 - rng.random(count)) ** (-1 / self.shape)
        else:
            other = self.scale * np.exp(rng.normal(0, self.sigma, count))
        chosen = np.where(rng.random(count) < self.tail, other, body)
        return np.clip(chosen, 16, window).astype(np.int64)


CORPORA = {
    "common_crawl": Corpus(median=1000, sigma=1.2, tail=0.010, scale=12_000, shape=0.6),
    "github": Corpus(median=1800, sigma=1.4, tail=0.015, scale=12_000, shape=0.7),
    "wikipedia": Corpus(median=700, sigma=1.0, tail=0.080, scale=12_000, shape=0),
}


def window_pieces(lengths: np.ndarray, window: int) -> np.ndarray:
    """Lengths of the pieces that ``original`` makes of documents, concatenated in their order."""
    total = int(lengths.sum())
    tokens = math.ceil(total / window) * window
    order, begin = np.arange(len(lengths)), StreamPosition()
    pieces, _ = next_pieces(order, lengths, begin, tokens, window, cuts_stream=True)
    return np.array([stop - start for _, start, stop in pieces], dtype=np.int64)


def stdlib_lengths() -> np.ndarray:
    """Bytes of the standard library's source files, from the committed list."""
    return np.array(json.loads(STDLIB_FILE.read_text())["lengths"], dtype=np.int64)


def measure_stdlib() -> dict[str, object]:
    """Bytes of every non-empty source file of this Python's standard library, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sizes = [
        path.stat().st_size
        for path in sorted(root.rglob("*.py"))
        if not {"site-packages", "dist-packages"} & set(path.parts)
    ]
    return {"python": platform.python_version(), "lengths": [size for size in sizes if size]}


if __name__ == "__main__":
    STDLIB_FILE.write_text(json.dumps(measure_stdlib(), separators=(",", ":")) + "\n")
