"""The workloads that every benchmark uses, so that figures compare.

* Generator A: the document lengths of long-context pretraining, log-normal with a Pareto tail
  (lightning_wlb/planning/synthetic_lengths.py).
* The standard library: sizes of Python's own source files, one byte one token, read from the
  committed ``stdlib_lengths.json`` (``python -m benchmarks.workloads`` measures this Python's
  and writes the file).
* The reference cost: one layer of LLaMA2-7B, without the output projection, so that attention
  over d tokens costs d²/49,408 token-equivalents forward and d²/42,350 forward and backward.
"""

from __future__ import annotations

import json
import math
import platform
import sysconfig
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
