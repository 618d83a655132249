"""What a planner is told: the settings of the data, and those of the mesh.

They are apart because which pieces enter a step may depend on the first and never on the second:
a run can move to another cluster and see the same data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_wlb.attention.sharding import ADAPTIVE
from lightning_wlb.planning.packing import PACKINGS, PackingMethod
from lightning_wlb.planning.release import check_thresholds

LongDocuments = Literal["split", "truncate", "error"]


@dataclass(frozen=True)
class DataSettings:
    """Settings that decide which pieces of which documents enter a step.

    Args:
        context_window: C, tokens of the longest piece.
        micro_batches: N, micro-batches of a global batch over all replicas; a global batch is
            N·C tokens.
        packing: name of the packing method, in ``lightning_wlb.planning.packing.PACKINGS``.
        cap: most tokens of a micro-batch over its context-parallel group; None for the packing's
            default (C for ``original``, 1.5·C for ``wlb``).
        queues: number of outlier queues whose thresholds are set from the length distribution;
            0 for no delay. Used by packings that delay.
        thresholds: least tokens of each outlier queue, strictly increasing; overrides ``queues``.
        long_documents: what becomes of a document above C: cut into pieces of C tokens, cut off
            at C, or an error.
        seed: of the order of documents, at least 0.
        shuffle: a new order in each epoch; else the order of the store.
        max_tokens: the first step that brings the run to so many tokens is its last.

    Raises:
        ValueError: a value out of range, with the remedy.
    """

    context_window: int
    micro_batches: int
    packing: str = "wlb"
    cap: int | None = None
    queues: int = 2
    thresholds: tuple[int, ...] | None = None
    long_documents: LongDocuments = "split"
    seed: int = 0
    shuffle: bool = True
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("context_window", 1), ("micro_batches", 1), ("queues", 0)):
            _at_least(name, getattr(self, name), least)
        _at_least("seed", self.seed, 0)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 1)
        if self.packing not in PACKINGS:
            raise ValueError(
                f"packing={self.packing!r} is not known; the packing methods are"
                f" {', '.join(PACKINGS)}."
            )
        if self.long_documents not in get_args(LongDocuments):
            raise ValueError(
                f"long_documents={self.long_documents!r}, but it must be one of"
                f" {', '.join(get_args(LongDocuments))}."
            )
        if self.token_cap < self.context_window:
            raise ValueError(
                f"cap={self.cap} is below context_window={self.context_window}: a piece of a whole"
                " window would fit no micro-batch. Raise the cap, or lower the context window."
            )
        if self.thresholds is not None:
            check_thresholds(self.thresholds, self.context_window)

    @property
    def method(self) -> PackingMethod:
        """The packing method."""
        return PACKINGS[self.packing]

    @property
    def token_cap(self) -> int:
        """Most tokens of a micro-batch: ``cap``, or the packing's default."""
        if self.cap is not None:
            return self.cap
        return self.context_window * self.method.cap_percent // 100

    @property
    def nominal_tokens(self) -> int:
        """Tokens of a global batch, N·C."""
        return self.micro_batches * self.context_window


@dataclass(frozen=True)
class MeshSettings:
    """Settings that decide where the micro-batches of a step run.

    Args:
        replicas: data-parallel replicas.
        context_parallel_size: ranks that share the tokens of a micro-batch.
        tensor_parallel_size: ranks that share its matrix products; rows are padded to divide.
        sharding: name of the sharding of every micro-batch, in
            ``lightning_wlb.attention.sharding.SHARDINGS``, or ``"adaptive"``: for each micro-batch
            the one of least predicted attention latency.

    Raises:
        ValueError: a size below 1.
    """

    replicas: int = 1
    context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    sharding: str = ADAPTIVE

    def __post_init__(self) -> None:
        for name in ("replicas", "context_parallel_size", "tensor_parallel_size"):
            _at_least(name, getattr(self, name), 1)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value}, but it must be at least {least}.")
