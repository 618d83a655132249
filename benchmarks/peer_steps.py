"""Other people's packers as packers of whole runs: one line of :data:`PEERS` each.

A packer of somebody else takes the documents of one step, or of all steps, and a limit. Here each
makes the steps of a run, as slices, on any mesh that its own code can serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks import peers
from benchmarks.meshes import powers
from benchmarks.packers_runs import WINDOW, Packed, whole, windows_of
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Slice

COUNT = 16
"""Windows of a step."""


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a comparison, as they arrive.

    Args:
        shape: the model, whose FLOPs some packers count.
        lengths: int64 [documents], none above the window.
        steps: the lengths of each step's documents, of whole global batches.
    """

    shape: ModelShape
    lengths: np.ndarray
    steps: list[list[int]]


@dataclass(frozen=True)
class Peer:
    """A packer of somebody else.

    Args:
        name: as in the tables.
        source: import name of its package (:func:`benchmarks.peers.version`).
        pack: (documents, mesh, limit, clones) -> the steps.
        limits: (mesh) -> limits that are tried.
        sharding: how its framework spreads a micro-batch over context-parallel ranks.
        axes: the axes that it can have besides data.
    """

    name: str
    source: str
    pack: Callable[[Documents, Mesh, int, Path | None], Iterable[Packed]]
    limits: Callable[[Mesh], Sequence[int]]
    sharding: str = "per_document"
    axes: tuple[str, ...] = ("pipeline", "context", "tensor")


def each_step(pack: Callable[..., peers.Packs]) -> Callable[..., Iterator[Packed]]:
    """A packer of one step's documents, as a packer of all steps."""

    @cache  # the packers look at no axis but data
    def packed(
        documents: Documents, step: int, mesh: Mesh, limit: int, clones: Path | None
    ) -> Packed:
        lengths = documents.steps[step]
        return whole(lengths, pack(lengths, mesh, limit, clones, documents.shape))

    def steps(
        documents: Documents, mesh: Mesh, limit: int, clones: Path | None
    ) -> Iterator[Packed]:
        seen = Mesh(data=mesh.data)
        for step in range(len(documents.steps)):
            yield packed(documents, step, seen, limit, clones)

    return steps


def rows_of_trl(strategy: str) -> Callable[..., Iterator[Packed]]:
    """TRL's rows in a random order, ``limit`` of them a micro-batch, dealt in turn."""

    def steps(
        documents: Documents, mesh: Mesh, limit: int, clones: Path | None
    ) -> Iterator[Packed]:
        found = peers.trl_rows(tuple(documents.lengths.tolist()), WINDOW, strategy)
        begun = [0] * len(documents.lengths)
        made: list[list[Slice]] = []
        for row in found:
            made.append([])
            for document, tokens in row:
                start, begun[document] = begun[document], begun[document] + tokens
                made[-1].append(Slice(document, start, start, start + tokens))
        order = np.random.default_rng(0).permutation(len(made))
        return dealt([made[at] for at in order], mesh, limit)

    return steps


def concatenated(
    documents: Documents, mesh: Mesh, limit: int, clones: Path | None
) -> Iterator[Packed]:
    """Documents one after another, cut into windows, ``limit`` of them a micro-batch."""
    return dealt(windows_of(documents.lengths), mesh, limit)


def dealt(rows: Sequence[list[Slice]], mesh: Mesh, limit: int) -> Iterator[Packed]:
    """Rows of a window as steps: ``limit`` of them a micro-batch, to replicas in turn."""
    for first in range(0, len(rows) - COUNT + 1, COUNT):
        of_replicas = [rows[first : first + COUNT][at :: mesh.data] for at in range(mesh.data)]
        yield [
            [
                [part for row in own[at : at + limit] for part in row]
                for at in range(0, len(own), limit)
            ]
            for own in of_replicas
        ]


def sampled(grouped: bool) -> Callable[..., Iterator[Packed]]:
    """Transformers' samplers; the limit is the number of micro-batches of a rank."""

    @cache
    def packed(documents: Documents, replicas: int, limit: int) -> list[peers.Packs]:
        lengths = documents.lengths.tolist()
        each = max(round(len(lengths) / len(documents.steps) / replicas / limit), 1)
        if grouped:
            return peers.transformers_grouped(lengths, each, replicas, limit, 0)
        return peers.transformers_rebalance(lengths, each * replicas * limit, replicas, limit, 0)

    def steps(
        documents: Documents, mesh: Mesh, limit: int, clones: Path | None
    ) -> Iterator[Packed]:
        for packs in packed(documents, mesh.data, limit):
            yield whole(documents.lengths, packs)

    return steps


def windows(*multiples: float) -> Callable[[Mesh], list[int]]:
    """Limits in windows, whatever the mesh."""
    return lambda mesh: [int(each * WINDOW) for each in multiples]


def rows(mesh: Mesh) -> list[int]:
    """How many rows a micro-batch may have."""
    return [each for each in (1, 2) if COUNT // mesh.data >= each]


def accumulated(mesh: Mesh) -> list[int]:
    """How many micro-batches a replica may have."""
    return [each for each in powers(64) if each * mesh.data <= 256]


PEERS = (
    Peer("concatenate and cut, no packer", "", concatenated, rows, "per_sequence"),
    Peer("TRL wrapped", "trl", rows_of_trl("wrapped"), rows, "per_sequence", ("context", "tensor")),
    Peer("TRL bfd", "trl", rows_of_trl("bfd"), rows, "per_sequence", ("context", "tensor")),
    Peer("transformers group_by_length", "transformers", sampled(True), accumulated,
         "per_sequence", ("context", "tensor")),
    # Its trainer runs it on data-parallel ranks only, where nothing fits here.
    Peer("transformers batch_rebalance", "transformers", sampled(False), accumulated,
         "per_sequence", ("context", "tensor")),
    Peer("Megatron DpBalancedScheduler", "megatron", each_step(
        lambda own, mesh, limit, clones, shape: peers.megatron_dp_balanced(
            own, mesh, limit, needed(clones))), windows(1, 1.5, 2)),
    Peer("verl rearrange_micro_batches", "verl", each_step(
        lambda own, mesh, limit, clones, shape: peers.verl(own, mesh, limit)), windows(1, 1.5, 2)),
    Peer("slime first fit, dealt by FLOPs", "slime", each_step(
        lambda own, mesh, limit, clones, shape: peers.slime(
            own, mesh, limit, needed(clones), shape, False)), windows(1, 1.5, 2)),
    Peer("slime balance_by_flops", "slime", each_step(
        lambda own, mesh, limit, clones, shape: peers.slime(
            own, mesh, limit, needed(clones), shape, True)), windows(0.25, 0.5, 1, 2)),
    Peer("DistCA's WLB-LLM", "distca", each_step(
        lambda own, mesh, limit, clones, shape: peers.distca_wlb(
            own, mesh, max(limit, mesh.data), 2 * WINDOW, needed(clones))),
        lambda mesh: [8, 16, 32]),
)  # fmt: skip


def needed(clones: Path | None) -> Path:
    """The folder of clones.

    Raises:
        benchmarks.peers.Missing: there is none.
    """
    if clones is None:
        raise peers.Missing("clone")
    return clones
