"""What a planner is told: the settings of the data, and those of the mesh.

They are apart because which pieces enter a step may depend on the first and never on the second:
a run can move to another cluster and see the same data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.arguments import choice, flag, number, whole, wholes
from lightning_wlb.attention.sharding import ADAPTIVE, NAMES
from lightning_wlb.planning.costs import PieceCosts
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.planning.packing.base import Packer, Rules
from lightning_wlb.planning.release import check_thresholds

_WHOLE = {
    # name: least
    "context_window": 1, "micro_batches": 1, "packing_window": 1, "max_age": 1,
    "nominal_replicas": 1, "nominal_stages": 1, "solver_nodes": 1, "micro_packs": 1,
    "queues": 0, "seed": 0,
}  # fmt: skip

LongDocuments = Literal["split", "truncate", "error"]
Solver = Literal["cbc", "highs"]


@dataclass(frozen=True)
class DataSettings:
    """Settings that decide which pieces of which documents enter a step.

    Args:
        context_window: C, tokens of the longest piece.
        micro_batches: N, micro-batches of a global batch over all replicas; a global batch is
            N·C tokens.
        packing: name of the packing method, in ``lightning_wlb.planning.packing.PACKINGS``. The
            default has the shortest simulated steps per unit of work on the reference workloads
            (``benchmarks/packing.py``), without delay.
        cap: most tokens of a micro-batch over its context-parallel group; None for the packing's
            default (C or 1.5·C, see its ``cap_percent``).
        queues: number of outlier queues whose thresholds are set from the length distribution;
            0 for no delay. Used by packings that delay.
        thresholds: least tokens of each outlier queue, strictly increasing; overrides ``queues``.
        long_documents: what becomes of a document above C: cut into pieces of C tokens, cut off
            at C, or an error.
        seed: of the order of documents, at least 0.
        shuffle: a new order in each epoch; else the order of the store.
        max_tokens: the first step that brings the run to so many tokens is its last.
        packing_window: global batches that ``fixed_greedy``, ``fixed_ilp`` and ``varlen_ilp`` pack
            together.
        delay_budget: mean delay of tokens, in steps, that the release of ``balanced``, ``tapered``
            and (with several ``nominal_replicas``) ``auto`` may cost; 0 for no delay.
        max_age: steps after which a piece waits no longer, in every method that delays (unless
            more than 2·N micro-batches would be needed: one document of many global batches).
        nominal_replicas: data-parallel replicas that balanced release has in mind. A data setting:
            it stays what it was when a run moves to another mesh.
        nominal_stages: pipeline stages that balanced release has in mind.
        solver: of the integer programs, ``"cbc"`` (comes with PuLP) or ``"highs"`` (needs highspy).
        solver_nodes: most branch-and-bound nodes of a solve.
        micro_packs: micro-batches that ``slim`` makes of a global batch, as a multiple of N. More
            fill the pipeline better, and make kernels smaller. It does not change what enters a
            step.
        asymmetric: whether ``auto`` also tries slices that are grouped apart for forward and for
            backward, in units, and takes them where their simulated step is shorter. Off, because
            on Generator A it never was, and planning takes more than twice as long. It does not
            change what enters a step.

    Raises:
        ValueError: a value out of range, with the remedy.
    """

    context_window: int
    micro_batches: int
    packing: str = "auto"
    cap: int | None = None
    queues: int = 2
    thresholds: tuple[int, ...] | None = None
    long_documents: LongDocuments = "split"
    seed: int = 0
    shuffle: bool = True
    max_tokens: int | None = None
    packing_window: int = 1
    delay_budget: float = 0.25
    max_age: int = 12
    nominal_replicas: int = 1
    nominal_stages: int = 4
    solver: Solver = "cbc"
    solver_nodes: int = 100
    micro_packs: int = 4
    asymmetric: bool = False

    def __post_init__(self) -> None:
        given = {
            **{name: whole(name, getattr(self, name), least) for name, least in _WHOLE.items()},
            **{
                name: whole(name, getattr(self, name), 1)
                for name in ("cap", "max_tokens")
                if getattr(self, name) is not None
            },
            "delay_budget": number("delay_budget", self.delay_budget, 0),
            "shuffle": flag("shuffle", self.shuffle),
            "asymmetric": flag("asymmetric", self.asymmetric),
            "packing": choice("packing", self.packing, PACKINGS),
            "long_documents": choice(
                "long_documents", self.long_documents, get_args(LongDocuments)
            ),
            "solver": choice("solver", self.solver, get_args(Solver)),
        }
        if self.thresholds is not None:
            given["thresholds"] = wholes("thresholds", self.thresholds)
        for name, value in given.items():
            object.__setattr__(self, name, value)
        if self.token_cap < self.context_window:
            raise ValueError(
                f"cap={self.cap} is below context_window={self.context_window}: a piece of a whole"
                " window would fit no micro-batch. Raise the cap, or lower the context window."
            )
        if self.thresholds is not None:
            check_thresholds(self.thresholds, self.context_window)

    @property
    def method(self) -> type[Packer]:
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

    def rules(
        self,
        lengths: NDArray[np.int64],
        work: Callable[[int], int],
        forward: Callable[[int], int] | None = None,
    ) -> Rules:
        """What the packing method is told.

        Args:
            lengths: tokens of each document, after truncation.
            work: cost of a piece from its tokens, forward and backward.
            forward: of the forward alone; None: a third of ``work``.
        """
        return Rules(
            lengths=lengths,
            window=self.context_window,
            micro_batches=self.micro_batches,
            cap=self.token_cap,
            work=work,
            forward=forward or work,
            costs=PieceCosts(work, self.context_window, forward),
            queues=self.queues,
            thresholds=self.thresholds,
            packing_window=self.packing_window,
            delay_budget=self.delay_budget,
            max_age=self.max_age,
            nominal_replicas=self.nominal_replicas,
            nominal_stages=self.nominal_stages,
            solver=self.solver,
            solver_nodes=self.solver_nodes,
            micro_packs=self.micro_packs,
            asymmetric=self.asymmetric,
        )


@dataclass(frozen=True)
class MeshSettings:
    """Settings that decide where the micro-batches of a step run.

    Args:
        replicas: data-parallel replicas.
        context_parallel_size: ranks that share the tokens of a micro-batch.
        tensor_parallel_size: ranks that share its matrix products; rows are padded to divide.
        pipeline_parallel_size: stages of the pipeline, which the number and order of micro-batches
            go by.
        sharding: name of the sharding of every micro-batch, in
            ``lightning_wlb.attention.sharding.NAMES``, or ``"adaptive"``: for each micro-batch
            the one of least predicted attention latency.
        stages_per_rank: virtual stages of each pipeline rank.
        slices: whether the pipeline's schedule runs slices of pieces; else ``auto`` keeps every
            piece whole.

    Raises:
        ValueError: a size below 1, or a sharding that is not known.
    """

    replicas: int = 1
    context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    sharding: str = ADAPTIVE
    pipeline_parallel_size: int = 1
    stages_per_rank: int = 1
    slices: bool = True

    def __post_init__(self) -> None:
        for name in (
            "replicas", "context_parallel_size", "tensor_parallel_size", "pipeline_parallel_size",
            "stages_per_rank",
        ):  # fmt: skip
            object.__setattr__(self, name, whole(name, getattr(self, name), 1))
        object.__setattr__(self, "slices", flag("slices", self.slices))
        choice("sharding", self.sharding, (ADAPTIVE, *NAMES))
