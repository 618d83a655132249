"""The data settings: what decides which pieces of which documents enter a step.

Which data enter a step depends on these settings alone: a run sees the same data on any mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.argument_checks import choice, flag, whole
from lightning_wlb.cost.flops import Work
from lightning_wlb.planning.packing import PackingChoice
from lightning_wlb.planning.packing.base import Packer, Rules

MOST_WINDOW, MOST_MICRO_BATCHES = 1 << 27, 1 << 20
"""Beyond these limits planning would exhaust time or memory: the user meant tokens or bytes."""

LongDocuments = Literal["split", "truncate", "error"]


@dataclass(frozen=True)
class DataSettings:
    """Settings that decide which pieces of which documents enter a step.

    Args:
        context_window: C, tokens of the longest piece.
        micro_batches: N, micro-batches of a global batch over all replicas; a global batch is
            N·C tokens, half a window more or less.
        packing: the packing method, by name or with options of its own, as in
            ``{"method": "wlb", "queues": 3}`` (:data:`~lightning_wlb.planning.packing.PACKINGS`
            lists the methods, each method's ``Options`` its options), or a subclass of ``Packer``.
            The default has the shortest simulated steps per unit of work
            (``benchmarks/results/packing.md``).
        cap: most tokens of a micro-batch over its context-parallel group; None for the packing's
            default (C or 1.5·C, see its ``cap_percent``).
        long_documents: a document above C is cut into pieces of C tokens, cut off, or an error.
        seed: gives the order of documents, at least 0.
        shuffle: whether each epoch has a new order; else every epoch has the store's order.
        max_tokens: the run ends with the first step that brings it to at least so many tokens.

    Raises:
        ValueError: a value out of range, with the remedy.
    """

    context_window: int
    micro_batches: int
    packing: str | type[Packer] | Mapping[str, Any] | PackingChoice = "auto"
    cap: int | None = None
    long_documents: LongDocuments = "split"
    seed: int = 0
    shuffle: bool = True
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        given: dict[str, Any] = {
            "context_window": whole("context_window", self.context_window, 1),
            "micro_batches": whole("micro_batches", self.micro_batches, 1),
            "packing": PackingChoice.of(self.packing),
            "long_documents": choice(
                "long_documents", self.long_documents, get_args(LongDocuments)
            ),
            "seed": whole("seed", self.seed, 0),
            "shuffle": flag("shuffle", self.shuffle),
        }
        for name, most in (("context_window", MOST_WINDOW), ("micro_batches", MOST_MICRO_BATCHES)):
            if given[name] > most:
                raise ValueError(
                    f"{name}={given[name]} is more than {most:,}. A step has micro_batches times"
                    " context_window tokens: the one counts micro-batches, the other tokens."
                )
        for name in ("cap", "max_tokens"):
            if getattr(self, name) is not None:
                given[name] = whole(name, getattr(self, name), 1)
        for name, value in given.items():
            object.__setattr__(self, name, value)
        if self.token_cap < self.context_window:
            raise ValueError(
                f"cap={self.cap} is below context_window={self.context_window}: a piece of a whole"
                " window would fit no micro-batch. Raise the cap, or lower the context window."
            )

    @property
    def packing_choice(self) -> PackingChoice:
        """The packing method with its options."""
        assert isinstance(self.packing, PackingChoice)  # since __post_init__
        return self.packing

    @property
    def packer(self) -> type[Packer]:
        """The packing method."""
        return self.packing_choice.packer

    @property
    def token_cap(self) -> int:
        """Most tokens of a micro-batch: ``cap``, or the packing's default."""
        if self.cap is not None:
            return self.cap
        return self.context_window * self.packer.cap_percent // 100

    @property
    def nominal_tokens(self) -> int:
        """Tokens of a global batch, N·C."""
        return self.micro_batches * self.context_window

    def rules(self, lengths: NDArray[np.int64], work: Work) -> Rules:
        """The settings, documents and model as the packing method sees them."""
        return Rules(
            lengths=lengths,
            window=self.context_window,
            micro_batches=self.micro_batches,
            cap=self.token_cap,
            work=work,
            options=self.packing_choice.options,
            cap_is_given=self.cap is not None,
        )
