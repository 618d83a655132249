"""Meshes proposed from the lengths alone: the dynamic programme of Hydraulis' §7, with context too.

A *scheme* is a way to run one replica: pipeline × context × tensor ranks. For each, the profile
says what a document of some length takes (the paper's T, App. B.2), and the memory model which
lengths it can hold, with the least activation checkpointing that does (MaxLen, App. B.1). Lengths
are divided into intervals. t[n][l], the least time in which n devices run all documents of up to l
tokens if each interval goes to devices of one scheme, follows from smaller n and l (Equation 4):

    t[n][l] = min over l' < l, g devices, schemes: max(t[n - g][l'], time of (l', l] on g devices)

Devices need not be whole replicas, which is the paper's continuous relaxation. Then what an
interval takes on g devices is its device time over g, whatever the scheme is, so that of the
schemes that can hold it only the one with the least device time matters.

The schemes with which t[N][l] is reached, for every l, are the proposal, for steps whose documents
have up to l tokens. The paper mixes them in a step: :func:`proposed_strategies`. Each is also
proposed for all replicas alike: the meshes that some lengths would like best.
T knows nothing of bubbles, of imbalance or of gathering parameters, so the meshes are to be
simulated (:mod:`~lightning_wlb.mesh_search.evaluate`), never taken as they come.

Cost: some hundred predictions of micro-batches for each legal scheme, and O(intervals² · steps²)
for at most 64 steps of devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.heterogeneous.planning.dealing import document_ns
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import legal_meshes
from lightning_wlb.plan import Scheme, Schemes, piece_counts, schemes_of

DEVICE_STEPS = 64
SHORTEST = 512
"""Tokens up to which documents are one interval; the next intervals are 1.41 times as long."""


class Part(NamedTuple):
    """What some devices do: one part of a strategy.

    Attributes:
        scheme: its number.
        longest: the last interval of documents that it runs.
        devices: steps of devices.
    """

    scheme: int
    longest: int
    devices: int


def propose(times: NDArray[np.float64], most: NDArray[np.int64], steps: int) -> list[list[Part]]:
    """The strategies with the least time for documents up to each interval (Equation 4).

    Args:
        times: [schemes, intervals], what one step of devices takes for all documents of an
            interval, shortest first.
        most: [schemes], how many of the intervals a scheme can hold.
        steps: of devices, N.

    Returns:
        For each interval the parts of the best strategy, those of short documents first; none
        where no scheme can hold it.
    """
    intervals = times.shape[1]
    # best[b][a]: device time of the intervals [a, b) with the scheme that takes the least.
    sums = np.concatenate((np.zeros((len(times), 1)), np.cumsum(times, axis=1)), axis=1)
    least = np.full((steps + 1, intervals + 1), np.inf)
    least[:, 0] = 0
    parts: dict[tuple[int, int], tuple[int, Part]] = {}
    for end in range(1, intervals + 1):
        able = np.flatnonzero(most >= end)
        if not len(able):
            continue
        for begin in range(end):
            whole = sums[able, end] - sums[able, begin]
            scheme = int(whole.argmin())
            for n in range(1, steps + 1):
                given = np.arange(1, n + 1)
                both = np.maximum(least[n - given, begin], whole[scheme] / given)
                at = int(both.argmin())
                if both[at] < least[n, end]:
                    least[n, end] = both[at]
                    parts[n, end] = begin, Part(int(able[scheme]), end - 1, at + 1)
    return [_parts(parts, steps, end) for end in range(1, intervals + 1)]


def _parts(made: dict[tuple[int, int], tuple[int, Part]], steps: int, end: int) -> list[Part]:
    found: list[Part] = []
    while end and (steps, end) in made:
        end, part = made[steps, end]
        steps -= part.devices
        found.append(part)
    return found[::-1]


def proposed_meshes(request: MeshRequest) -> list[Mesh]:
    """Meshes whose scheme is in one of the proposed strategies, in the order of the enumeration.

    Each comes with every number of virtual stages that is legal, about which the programme is
    silent.
    """
    legal = legal_meshes(request)
    meshes, strategies = _proposed(request, legal)
    chosen = {meshes[part.scheme].shape for parts in strategies for part in parts}
    return [mesh for mesh in legal if mesh.shape in chosen]


def proposed_strategies(request: MeshRequest) -> list[Schemes]:
    """The proposed strategies with whole pipelines, and those of the meshes of their schemes.

    Larger pipelines come first, so that none lies across nodes as no mesh does, and none has
    virtual stages. Of the sizes that the request gives only tensor 1 is kept to, as of a model
    whose weights cannot be split: pipelines are to differ from the mesh.
    """
    fixed = {"tensor": 1} if request.fixed.get("tensor") == 1 else {}
    request = replace(request, fixed=fixed, virtual_stages=1)
    meshes, strategies = _proposed(request, legal_meshes(request))
    steps = min(request.devices, DEVICE_STEPS)
    found: dict[Schemes, None] = {}
    for parts in filter(None, strategies):  # there is none for what no scheme can hold
        counts = _whole({part.scheme: part.devices / steps for part in parts}, meshes)
        schemes: list[Scheme] = []
        for number, count in counts.items():
            like = schemes_of(meshes[number], request.predictor(meshes[number]).stages)[0]
            for _ in range(count):
                first = schemes[-1].ranks.stop if schemes else 0
                schemes.append(replace(like, first=first))
        found[tuple(schemes)] = None
    for number in sorted({part.scheme for parts in strategies for part in parts}):
        mesh = meshes[number]
        found[schemes_of(mesh, request.predictor(mesh).stages)] = None
    return list(found)


def _whole(shares: Mapping[int, float], meshes: Sequence[Mesh]) -> dict[int, int]:
    """Numbers of pipelines of some schemes, the largest first, that fill all devices.

    Each scheme has at least one, as far as there is room, and else what its share asks for,
    rounded; the smallest has what is left. Sizes are powers of two, so nothing stays over.

    Args:
        shares: of the devices, by number of the scheme.
        meshes: of all schemes.
    """
    devices = meshes[0].devices
    sizes = {number: devices // meshes[number].data for number in shares}
    order = sorted(sizes, key=lambda number: (-sizes[number], number))
    counts, left = dict.fromkeys(order, 0), devices
    for at, number in enumerate(order):
        size, last = sizes[number], at == len(order) - 1
        asked = left // size if last else max(round(shares[number] * devices / size), 1)
        counts[number] = min(asked, left // size)
        left -= counts[number] * size
    return {number: count for number, count in counts.items() if count}


def _proposed(request: MeshRequest, legal: Sequence[Mesh]) -> tuple[list[Mesh], list[list[Part]]]:
    """The schemes as meshes without virtual stages, and the strategy for each interval's end."""
    meshes = list(dict.fromkeys(replace(mesh, virtual_stages=1) for mesh in legal))
    counts = piece_counts(request.lengths, request.data.context_window)
    pieces = np.array(sorted(counts), np.int64)
    weights = np.array([counts[tokens] for tokens in pieces.tolist()], np.int64)
    edges = _edges(request.data.context_window)
    held = np.searchsorted(edges, pieces)  # the interval of each length
    intervals = sorted(set(held.tolist()))
    times, most = [], []
    for mesh in meshes:
        predictor = request.predictor(mesh)
        longest = [predictor.longest_micro_batch(mesh.pipeline, mode) for mode in request.modes]
        of_scheme = []
        for interval in intervals:
            own = held == interval
            tokens, number = int((pieces[own] * weights[own]).sum()), int(weights[own].sum())
            top = pieces[own].max()
            fit = [m for m, limit in zip(request.modes, longest, strict=True) if limit >= top]
            if not fit:
                break
            time = document_ns(predictor, tokens // number, fit[0])
            of_scheme.append(time * number * mesh.devices / mesh.data)
        most.append(len(of_scheme))
        times.append(of_scheme + [np.inf] * (len(intervals) - len(of_scheme)))
    table = np.where(np.isinf(times), 0, times)  # never read beyond what a scheme can hold
    return meshes, propose(table, np.array(most), min(request.devices, DEVICE_STEPS))


def _edges(window: int) -> NDArray[np.int64]:
    """Last token of each interval: half-powers of two, and the window."""
    edges = [SHORTEST]
    while edges[-1] < window:
        edges.append(min(edges[-1] * 181 // 128, window))
    return np.array(edges, np.int64)
