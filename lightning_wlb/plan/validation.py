"""What makes a step plan one that can run, each rule a function that names what breaks it.

Cost: linear in the number of slices, but for sorting them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from lightning_wlb.plan.parts import MicroBatch, Piece, ReplicaPlan, Slice


class Plan(Protocol):
    """What the rules read of a :class:`~lightning_wlb.plan.step.StepPlan`, which applies them."""

    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def replicas(self) -> tuple[ReplicaPlan, ...]: ...  # noqa: D102
    @property
    def pieces(self) -> tuple[Piece, ...]: ...  # noqa: D102
    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def target_tokens(self) -> int: ...  # noqa: D102
    @property
    def cap(self) -> int: ...  # noqa: D102


def check(plan: Plan) -> None:
    """Refuse a plan that cannot run.

    Raises:
        ValueError: naming the document and range, micro-batch or replica that is wrong.
    """
    _check_slices(plan)
    for number, replica in enumerate(plan.replicas):
        for pass_name, groups in (("forward", replica.forward), ("backward", replica.backward)):
            _check_groups(plan, number, replica, pass_name, groups)
    _check_order(plan)
    _check_merged(plan)
    if plan.target_tokens < 0 or plan.target_tokens > plan.tokens:
        raise ValueError(
            f"step {plan.step}: target_tokens={plan.target_tokens} is not between 0 and the"
            f" step's {plan.tokens} tokens."
        )


def _check_slices(plan: Plan) -> None:
    """Every token of every released piece in exactly one slice, on one replica or merged group."""
    homes: dict[Slice, list[int]] = defaultdict(list)
    for number, replica in enumerate(plan.replicas):
        for piece in replica.slices:
            if not 0 <= piece.origin <= piece.start < piece.stop:
                raise ValueError(
                    f"step {plan.step}, replica {number}: slice {tuple(piece)} is not"
                    " (document, origin, start, stop) with 0 <= origin <= start < stop."
                )
            homes[piece].append(number)
    shared: dict[Slice, tuple[int, ...]] = {}
    for replica in plan.replicas:
        for group in (*replica.forward, *replica.backward):
            for index in group.slices:
                if 0 <= index < len(replica.slices):
                    shared[replica.slices[index]] = group.replicas
    for piece, where in homes.items():
        if len(where) > 1 and tuple(where) != shared.get(piece):
            raise ValueError(
                f"step {plan.step}: tokens {piece} are doubled: replicas {where} all hold them,"
                " and no merged micro-batch says so."
            )
    _check_pieces(plan)
    covered: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for piece in homes:
        covered[piece.document, piece.origin].append(piece)
    for released in plan.pieces:
        parts = sorted(covered.pop((released.document, released.origin), []))
        at = released.origin
        for part in [
            *parts,
            Slice(released.document, released.origin, released.stop, released.stop),
        ]:
            if part.start > at:
                raise ValueError(
                    f"step {plan.step}: tokens [{at}, {part.start}) of document"
                    f" {released.document} were released but are in no slice."
                )
            if part.start < at:
                raise ValueError(
                    f"step {plan.step}: tokens [{part.start}, {at}) of document"
                    f" {released.document} are in two slices, or beyond the end of their piece at"
                    f" {released.stop}."
                )
            at = part.stop
    if covered:
        document, origin = min(covered)
        raise ValueError(
            f"step {plan.step}: the piece of document {document} at {origin} is in"
            f" {len(covered[document, origin])} slice(s) but was not released in this step."
        )


def _check_pieces(plan: Plan) -> None:
    """Released pieces hold at least one token, and no token is in two of them."""
    before: Piece | None = None
    for piece in sorted(plan.pieces):
        if not 0 <= piece.origin < piece.stop:
            raise ValueError(
                f"step {plan.step}: released piece {tuple(piece)} is not (document, origin, stop,"
                " arrival) with 0 <= origin < stop."
            )
        if before is not None and before.document == piece.document and before.stop > piece.origin:
            raise ValueError(
                f"step {plan.step}: tokens [{piece.origin}, {min(before.stop, piece.stop)}) of"
                f" document {piece.document} are doubled: two released pieces hold them."
            )
        before = piece


def _check_groups(
    plan: Plan, number: int, replica: ReplicaPlan, pass_name: str, groups: Sequence[MicroBatch]
) -> None:
    """Every slice of the replica in exactly one micro-batch of the pass, none above the cap."""
    where = f"step {plan.step}, replica {number}, {pass_name}"
    seen: dict[int, int] = {}
    for index, group in enumerate(groups):
        for position in group.slices:
            if not 0 <= position < len(replica.slices):
                raise ValueError(
                    f"{where}: micro-batch {index} lists slice {position}, but the replica has"
                    f" {len(replica.slices)} slices."
                )
            if position in seen:
                raise ValueError(
                    f"{where}: slice {replica.slices[position]} is in micro-batches"
                    f" {seen[position]} and {index}."
                )
            seen[position] = index
        tokens = replica.tokens_of(group)
        if tokens > plan.cap:
            raise ValueError(
                f"{where}: micro-batch {index} has {tokens} tokens, more than the cap"
                f" of {plan.cap}."
            )
        if number not in group.replicas or any(
            not 0 <= other < len(plan.replicas) for other in group.replicas
        ):
            raise ValueError(
                f"{where}: micro-batch {index} names replicas {group.replicas}; it must name"
                f" {number} and replicas below {len(plan.replicas)}."
            )
    for position, piece in enumerate(replica.slices):
        if position not in seen:
            raise ValueError(f"{where}: slice {piece} is in no micro-batch.")


def _check_order(plan: Plan) -> None:
    """A piece on one replica or merged group; its slices forward in order, backward reversed."""
    homes: dict[tuple[int, int], tuple[int, ...]] = {}
    for number, replica in enumerate(plan.replicas):
        for pass_name, groups in (("forward", replica.forward), ("backward", replica.backward)):
            seen: dict[tuple[int, int], tuple[int, Slice]] = {}
            for index, group in enumerate(groups):
                ordered = sorted(replica.slices_of(group), reverse=pass_name == "backward")
                for piece in ordered:
                    key = (piece.document, piece.origin)
                    if homes.setdefault(key, group.replicas) != group.replicas:
                        raise ValueError(
                            f"step {plan.step}: slices of the piece of document {piece.document} at"
                            f" {piece.origin} are on replicas {homes[key]} and {group.replicas}."
                        )
                    before = seen.get(key)
                    if before is not None:
                        late, early = (piece, before[1])
                        if pass_name == "backward":
                            late, early = early, late
                        if early.start >= late.start:
                            raise ValueError(
                                f"step {plan.step}, replica {number}, {pass_name}: slice"
                                f" {before[1]} in micro-batch {before[0]} runs before {piece} in"
                                f" micro-batch {index}; slices run forward in order and backward"
                                " in reverse order."
                            )
                    seen[key] = (index, piece)


def _check_merged(plan: Plan) -> None:
    """A shared micro-batch names an aligned power-of-two group whose members all list it."""
    for number, replica in enumerate(plan.replicas):
        for pass_name in ("forward", "backward"):
            for group in getattr(replica, pass_name):
                members = group.replicas
                size = len(members)
                first = members[0]
                if (
                    size & (size - 1)
                    or first % size
                    or members != tuple(range(first, first + size))
                ):
                    raise ValueError(
                        f"step {plan.step}, replica {number}: a micro-batch is shared by replicas"
                        f" {members}, which is not an aligned power-of-two range."
                    )
                wanted = replica.slices_of(group)
                for other in members:
                    peer = plan.replicas[other]
                    if not any(
                        (candidate.replicas, candidate.sharding, candidate.rows)
                        == (members, group.sharding, group.rows)
                        and peer.slices_of(candidate) == wanted
                        for candidate in getattr(peer, pass_name)
                    ):
                        raise ValueError(
                            f"step {plan.step}: replica {number} shares a {pass_name} micro-batch"
                            f" with replicas {members}, but replica {other} does not list it."
                        )
