"""The rules that a step plan must keep to run; each is a function that names what breaks it.

Cost: linear in the number of slices, except for sorting them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import get_args

from lightning_wlb.argument_checks import choice
from lightning_wlb.plan.micro_batches import MicroBatch, Piece, Recompute, ReplicaPlan, Slice
from lightning_wlb.plan.pipeline_scheme import Scheme, alike, check_schemes

_MODES = get_args(Recompute)

_Shared = tuple[tuple[int, ...], str, int, Recompute, tuple[Slice, ...]]
"""A shared micro-batch: its replicas, sharding, rows, recompute and slices."""


def check(
    step: int,
    replicas: Sequence[ReplicaPlan],
    pieces: Sequence[Piece],
    cap: int,
    schemes: Sequence[Scheme] = (),
) -> None:
    """Raise ValueError, naming what is wrong, for parts of a ``StepPlan`` that cannot run."""
    if schemes:
        if len(schemes) != len(replicas):
            raise ValueError(
                f"step {step}: {len(schemes)} schemes for {len(replicas)} replicas; give each one."
            )
        check_schemes(f"step {step}", schemes)
    for number, replica in enumerate(replicas):
        where = f"step {step}, replica {number}"
        _check_slices(where, replica)
        for index, micro_batch in enumerate(replica.forward):
            _check_micro_batch(f"{where}: micro-batch {index}", replica, micro_batch, cap)
            named = micro_batch.replicas
            if number not in named or not all(0 <= other < len(replicas) for other in named):
                raise ValueError(
                    f"{where}: micro-batch {index} names replicas {named}; it must name"
                    f" {number} and replicas below {len(replicas)}."
                )
            if schemes:
                _check_fits(f"{where}: micro-batch {index}", schemes, replica, micro_batch)
    _check_pieces(step, pieces)
    _check_order(step, replicas)
    _check_coverage(step, replicas, pieces)
    places = alike(schemes).values() if schemes else [range(len(replicas))]
    _check_merged(step, replicas, {own: each for each in places for own in each})


def _check_fits(
    where: str, schemes: Sequence[Scheme], replica: ReplicaPlan, micro_batch: MicroBatch
) -> None:
    """Replicas that share a micro-batch have equal shapes, and its rows were laid out for them."""
    first, *others = micro_batch.replicas
    scheme = schemes[first]
    unlike = [n for n in others if schemes[n].shape != scheme.shape]
    if unlike:
        raise ValueError(
            f"{where} is shared by replicas {micro_batch.replicas}, but replica {first} is on"
            f" {scheme}, replica {unlike[0]} on {schemes[unlike[0]]}. Only pipelines of equal"
            " stages, context and tensor sizes share one."
        )
    tokens, rows = replica.tokens_of(micro_batch), micro_batch.rows
    held = rows * scheme.context * len(micro_batch.replicas)
    if rows % scheme.tensor or held < tokens:
        raise ValueError(
            f"{where} has {rows} rows on each context rank for {tokens} tokens, no multiple of the"
            f" tensor size, or too few. It was laid out for another scheme than that on {scheme}."
        )


def _check_pieces(step: int, pieces: Sequence[Piece]) -> None:
    """Released pieces hold at least one token, and no token is in two of them."""
    before: Piece | None = None
    for piece in sorted(pieces):
        if not 0 <= piece.origin < piece.stop:
            raise ValueError(
                f"step {step}: released piece {tuple(piece)} is not (document, origin, stop,"
                " arrival) with 0 <= origin < stop."
            )
        if before is not None and before.document == piece.document and before.stop > piece.origin:
            raise ValueError(
                f"step {step}: tokens [{piece.origin}, {min(before.stop, piece.stop)}) of"
                f" document {piece.document} are doubled: two released pieces hold them."
            )
        before = piece


def _check_coverage(step: int, replicas: Sequence[ReplicaPlan], pieces: Sequence[Piece]) -> None:
    """Every token of every released piece is in exactly one slice, and no other token is."""
    parts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for document, origin, start, stop in sorted({*chain(*(each.slices for each in replicas))}):
        parts[document, origin].append((start, stop))
    for document, origin, stop, _ in pieces:
        at = origin
        for start, end in [*parts.pop((document, origin), ()), (stop, stop)]:
            if start > at:
                raise ValueError(
                    f"step {step}: tokens [{at}, {start}) of document {document} were"
                    " released but are in no slice."
                )
            if start < at:
                raise ValueError(
                    f"step {step}: tokens [{start}, {at}) of document {document} are in two"
                    f" slices, or beyond the end of their piece at {stop}."
                )
            at = end
    if parts:
        document, origin = min(parts)
        raise ValueError(
            f"step {step}: the piece of document {document} at {origin} is in"
            f" {len(parts[document, origin])} slice(s) but was not released in this step."
        )


def _check_slices(where: str, replica: ReplicaPlan) -> None:
    """Every slice holds tokens, and is in exactly one micro-batch."""
    home: dict[int, int] = {}
    for index, micro_batch in enumerate(replica.forward):
        for position in micro_batch.slices:
            if not 0 <= position < len(replica.slices):
                raise ValueError(
                    f"{where}: micro-batch {index} lists slice {position}, but the replica has"
                    f" {len(replica.slices)} slices."
                )
            if home.setdefault(position, index) != index:
                raise ValueError(
                    f"{where}: slice {replica.slices[position]} is in micro-batches"
                    f" {home[position]} and {index}."
                )
    for position, part in enumerate(replica.slices):
        if not 0 <= part.origin <= part.start < part.stop:
            raise ValueError(
                f"{where}: slice {tuple(part)} is not (document, origin, start, stop) with"
                " 0 <= origin <= start < stop."
            )
        if position not in home:
            raise ValueError(f"{where}: slice {part} is in no micro-batch.")


def _check_micro_batch(where: str, replica: ReplicaPlan, micro_batch: MicroBatch, cap: int) -> None:
    """A micro-batch has at most the cap's tokens, and names a sharding and a known recompute."""
    tokens = replica.tokens_of(micro_batch)
    if tokens > cap:
        raise ValueError(f"{where} has {tokens} tokens, more than the cap of {cap}.")
    name = micro_batch.sharding  # which is printed
    if not isinstance(name, str) or not name.isprintable():
        raise ValueError(f"{where} has sharding={name!r}, which is no name.")
    choice(f"{where} has recompute", micro_batch.recompute, _MODES)


def _check_order(step: int, replicas: Sequence[ReplicaPlan]) -> None:
    """Slices of a piece are on the same replicas, and each runs forward once, in order."""
    on: dict[tuple[int, ...], tuple[int, ...]] = {}
    for number, replica in enumerate(replicas):
        seen: dict[tuple[int, ...], tuple[int, Slice]] = {}
        for index, micro_batch in enumerate(replica.forward):
            for part in sorted(replica.slices_of(micro_batch)):
                key = part[:2]
                if on.setdefault(key, micro_batch.replicas) != micro_batch.replicas:
                    raise ValueError(
                        f"step {step}: slices of the piece of document {part.document} at"
                        f" {part.origin} are on replicas {on[key]} and {micro_batch.replicas}."
                    )
                if key in seen and seen[key][1].start >= part.start:
                    at, before = seen[key]
                    raise ValueError(
                        f"step {step}, replica {number}: slice {before} in micro-batch {at} runs"
                        f" before {part} in micro-batch {index}; slices run in order, each once."
                    )
                seen[key] = index, part


def _check_merged(
    step: int, replicas: Sequence[ReplicaPlan], like: Mapping[int, Sequence[int]]
) -> None:
    """A shared micro-batch names an aligned power-of-two range of replicas, which all list it.

    The range counts only replicas of equal shape: ``like`` lists these for each replica, itself
    included. Replicas run shared micro-batches in one order, else they would deadlock.
    """
    # An unshared micro-batch is left out: `check` has seen that its own replica runs it.
    listed: dict[_Shared, list[int]] = {}
    order: TopologicalSorter[_Shared] = TopologicalSorter()
    for number, replica in enumerate(replicas):
        before: _Shared | None = None
        for each in replica.forward:
            if len(each.replicas) > 1:
                slices = replica.slices_of(each)
                shared = each.replicas, each.sharding, each.rows, each.recompute, slices
                if shared not in listed:
                    _check_range(f"step {step}, replica {number}", each.replicas, like[number])
                listed.setdefault(shared, []).append(number)
                if slices:  # they identify it, as each slice is in one micro-batch
                    order.add(shared, *([before] if before else []))
                    before = shared
    for (members, *_), own in listed.items():
        if missing := sorted(set(members).difference(own)):
            raise ValueError(
                f"step {step}: replica {own[0]} shares a micro-batch with replicas {members}, but"
                f" replica {missing[0]} does not list it."
            )
    try:
        order.prepare()
    except CycleError as error:
        (members, *_, slices), *_ = error.args[1]
        raise ValueError(
            f"step {step}: replicas {members} share a micro-batch of {slices[0]} and others, which"
            " they do not all run in one order: they would wait for each other for ever."
        ) from error


def _check_range(where: str, members: Sequence[int], like: Sequence[int]) -> None:
    size, first = len(members), like.index(members[0])
    if size & (size - 1) or first % size or members != (*like[first : first + size],):
        raise ValueError(
            f"{where}: a micro-batch is shared by replicas {members}, which is not an aligned"
            f" power-of-two range of {[*like]}."
        )
