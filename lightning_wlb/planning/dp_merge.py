"""DP-Merge: pieces too large for one replica are spread over several (SlimPack §4.1.1).

A piece whose work exceeds the share alpha of a replica's capacity (Σ work / replicas) runs on an
aligned power-of-two set of replicas, whose context-parallel groups act as one: the smallest set on
which each replica's part is within that share. Where memory is known, a piece that one replica
cannot hold is shared by as many as can hold it together, whatever its work. Pieces with the largest
sets are placed first, and among equal sets the pieces with the most work, each on the set whose
busiest member has the least work. The other pieces are then dealt one by one to the replica with
the least work. If they are dealt again to give some replicas less work, the long pieces stay on
their replicas: moving them would change recomputation and waits more than the lateness to remove.

Shared micro-batches come first on all their replicas, in descending size of the sets. Sets are
aligned, so a set lies within every larger set that it meets, and all its members run the same
micro-batches before its own: no two replicas wait for each other in different orders.

Cost: O(P·log P + merged pieces · replicas). Do not use it where the links between replicas are much
slower than those in a context-parallel group: the shared pieces' keys then cost more than it gains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece
from lightning_wlb.planning.dealing import deal, longest_first
from lightning_wlb.planning.replica_plans import Shared
from lightning_wlb.planning.slicing import share_packs, slice_pieces
from lightning_wlb.planning.tuning import SHARING_OVERHEAD_PERCENT

Members = tuple[int, ...]


class Merged(NamedTuple):
    """The pieces of a step dealt to replicas; several replicas may share a piece."""

    #: pieces and the replicas that share each, in the order in which they run
    shared: list[tuple[Piece, Members]]
    own: list[list[Piece]]  #: the other pieces of each replica, in descending length
    #: work of each replica, with its parts of shared pieces and their overhead
    loads: list[int]


@dataclass(frozen=True)
class Dealing:
    """A way to deal pieces to replicas, which share the pieces of too much work or too many tokens.

    Equal pieces go by (document, origin), equal replicas and sets by number.
    """

    pieces: Sequence[Piece]  #: all pieces of the step
    replicas: int  #: number of replicas; a set that would be incomplete at the end is not used
    work: Callable[[int], int]  #: cost of a piece from its tokens, an integer
    per_capacity: int = 0  #: 1/alpha: a piece is shared if its work times this exceeds the capacity
    #: tokens of the longest piece that one replica can hold, at least 1
    most_tokens: int = sys.maxsize
    #: work that each replica counts as having already; none if empty. Longest first, unshared
    #: pieces go where they would without it, until one gives its replica more than its share
    handicaps: Sequence[int] = ()
    sharers: int = sys.maxsize  #: most replicas that may share a piece (:func:`most_sharers`)

    def again(self, ends: Sequence[int]) -> Dealing:
        """A new dealing that gives less work to the replicas that ended late."""
        loads = self.merged.loads
        late = [end * sum(loads) // sum(ends) - load for end, load in zip(ends, loads, strict=True)]
        return replace(self, handicaps=late)

    @cached_property
    def merged(self) -> Merged:
        """The pieces that each replica has, alone and with others."""
        order = longest_first(self.pieces)
        works, replicas = [self.work(piece.tokens) for piece in order], self.replicas
        total = sum(works)
        sizes = [
            self.size(piece.tokens, each, total) for piece, each in zip(order, works, strict=True)
        ]
        sized = [entry for entry in zip(sizes, order, works, strict=True) if entry[0] > 1]
        sized.sort(key=lambda entry: -entry[0])
        loads = [0] * replicas
        shared: list[tuple[Piece, Members]] = []
        for size, piece, piece_work in sized:
            sets = [range(first, first + size) for first in range(0, replicas - size + 1, size)]
            members = min(sets, key=lambda each: max(loads[replica] for replica in each))
            part = shared_work(piece_work, size)
            for replica in members:
                loads[replica] += part
            shared.append((piece, tuple(members)))
        own: list[list[Piece]] = [[] for _ in range(replicas)]
        alone = [at for at, size in enumerate(sizes) if size == 1]
        receivers = deal([works[at] for at in alone], list(loads))
        if self.handicaps:
            taken = [load + before for load, before in zip(loads, self.handicaps, strict=True)]
            share = (sum(taken) + sum(works[at] for at in alone)) // replicas
            stay = 0
            for at, replica in zip(alone, receivers, strict=True):
                if taken[replica] + works[at] > share:
                    break
                taken[replica] += works[at]
                stay += 1
            receivers[stay:] = deal([works[at] for at in alone[stay:]], taken)
        for at, replica in zip(alone, receivers, strict=True):
            own[replica].append(order[at])
            loads[replica] += works[at]
        return Merged(shared, own, loads)

    def size(self, tokens: int, work: int, total: int) -> int:
        """Number of replicas that share a piece: the least power of two that holds it within alpha.

        ``work`` is the work of the piece, ``total`` the work of all pieces.
        """
        holders, shares = -(-tokens // self.most_tokens), self.per_capacity * self.replicas
        if holders == 1 and work * shares <= total:
            return 1
        parts = work * (100 + SHARING_OVERHEAD_PERCENT) * shares
        size = 2
        while 2 * size <= self.replicas and (size < holders or parts > 100 * size * total):
            size *= 2
        return min(size, self.sharers) if size <= self.replicas else 1


def most_sharers(work: Work, mesh: Mesh) -> int:
    """Most replicas that may share a piece: all their ranks divide the recurrence's heads."""
    heads, others = divmod(work.recurrent_heads, mesh.context * mesh.tensor)
    # The largest power of two that divides the heads left for each rank of a replica.
    return 1 if others else heads & -heads or mesh.data


def shared_work(work: int, members: int) -> int:
    """One replica's part of a shared piece's work, the overhead of sharing included."""
    return work * (100 + SHARING_OVERHEAD_PERCENT) // (100 * members)


def own_work(merged: Merged, work: Callable[[int], int]) -> list[int]:
    """Work of each replica's own pieces."""
    return [sum(work(piece.tokens) for piece in pieces) for pieces in merged.own]


def slice_shared(merged: Merged, packs: int, cap: int, work: PassWork) -> list[Shared]:
    """The MicroPacks of the shared pieces, sized as if all replicas made ``packs`` MicroPacks."""
    shared: list[Shared] = []
    for piece, members in merged.shared:
        part = shared_work(work(piece.tokens), len(members))
        (count,) = share_packs([part], packs, sum(merged.loads))
        shared += [(pack, members) for pack in slice_pieces([piece], count, cap, work)]
    return shared
