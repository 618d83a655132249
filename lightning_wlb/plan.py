"""The plan of one optimiser step: which tokens run when, on which replica, in which group.

Everything between the document lengths and the gradients speaks this language. A planner
writes a :class:`StepPlan`; the data loader turns it into tensors, a schedule turns it into
actions, the simulator predicts it and the executor runs it. A plan holds plain integers and
strings only, is the same object on every rank, and can be printed, validated, compared by
digest and sent through JSON.

Vocabulary (docs/design.md):

* a *document* is an entry of the document store, by number;
* a *piece* is the part of a document that attends only to itself: a whole document, or what
  the context window (or ``original`` packing) cut from one. Positions start at its origin;
* a *slice* is the part of a piece that runs in one micro-batch. A piece in one slice is the
  usual case; a piece in several is SlimPack.

Cost: validation is linear in the number of slices.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """Tokens ``[origin, stop)`` of a document, which attend to each other and nothing else.

    ``arrival`` is the optimiser step whose global batch brought the piece (0-based); a piece
    released at step s was delayed by ``s - arrival`` steps.
    """

    document: int
    origin: int
    stop: int
    arrival: int

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.stop - self.origin


class Slice(NamedTuple):
    """Tokens ``[start, stop)`` of a document, whose attention and positions begin at ``origin``.

    ``origin <= start < stop``; all in tokens from the start of the store's document.
    """

    document: int
    origin: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.stop - self.start

    @property
    def context(self) -> int:
        """Tokens of the same piece that the slice attends to before its own first token."""
        return self.start - self.origin

    def __str__(self) -> str:
        piece = f"{self.document}" if self.origin == 0 else f"{self.document}@{self.origin}"
        return f"{piece}[{self.start}:{self.stop})"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Slices that go through the pipeline as one unit.

    Args:
        slices: indices into the replica's ``slices``, in the order in which their tokens are
            laid out. Empty for a micro-batch without tokens.
        sharding: name of the sharding that spreads the tokens over the context-parallel group
            (``lightning_wlb.attention.sharding.SHARDINGS``).
        rows: rows per context-parallel rank after padding, so that every rank knows the size
            of every message without asking.
        replicas: the data-parallel replicas that share the micro-batch: one, or for DP-Merge
            an aligned power-of-two group, all of which list it.
    """

    slices: tuple[int, ...]
    sharding: str
    rows: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """What one data-parallel replica does in a step.

    Args:
        slices: the common refinement of every cut, forward and backward.
        forward: micro-batches in the order in which their forward runs.
        backward: micro-batches in the order in which their backward runs. Unless the plan is
            asymmetric these are the same groups, see :func:`symmetric_backward`.
    """

    slices: tuple[Slice, ...]
    forward: tuple[MicroBatch, ...]
    backward: tuple[MicroBatch, ...]

    @property
    def tokens(self) -> int:
        """New tokens of the replica in this step."""
        return sum(piece.tokens for piece in self.slices)

    def slices_of(self, micro_batch: MicroBatch) -> tuple[Slice, ...]:
        """The slices of a micro-batch, in layout order."""
        return tuple(self.slices[index] for index in micro_batch.slices)

    def tokens_of(self, micro_batch: MicroBatch) -> int:
        """New tokens of a micro-batch, over its whole context-parallel group."""
        return sum(self.slices[index].tokens for index in micro_batch.slices)


@dataclass(frozen=True)
class StepPlan:
    """Everything that one optimiser step does, on all replicas.

    Args:
        step: optimiser step, 0-based, counted over the whole run.
        epoch: pass over the document store, 0-based.
        replicas: one plan for each data-parallel replica.
        pieces: the pieces released in this step, in a canonical order.
        target_tokens: tokens with a next-token target, over all replicas: the loss divides by it.
        cap: most new tokens of a micro-batch over its context-parallel group.
        micro_batches: N, the configured number of micro-batches of a global batch. A step may run
            fewer (empty ones are left out), and then N counts them in every imbalance degree; or
            more, where the packing chooses their number.
        nominal_tokens: the configured tokens of a global batch, N times the context window.
        drain: whether the step empties queues after the epoch's last arrival.
    """

    step: int
    epoch: int
    replicas: tuple[ReplicaPlan, ...]
    pieces: tuple[Piece, ...]
    target_tokens: int
    cap: int
    micro_batches: int
    nominal_tokens: int
    drain: bool = False

    @property
    def tokens(self) -> int:
        """New tokens of the step, over all replicas."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def delay(self) -> float:
        """Mean delay of the step's tokens in steps (docs/design.md, "delay")."""
        held = sum(piece.tokens * (self.step - piece.arrival) for piece in self.pieces)
        return held / max(self.tokens, 1)

    @property
    def max_delay(self) -> int:
        """Largest delay of a piece in steps."""
        return max((self.step - piece.arrival for piece in self.pieces), default=0)

    def validate(self) -> StepPlan:
        """Return the plan itself if it is one that can run.

        Raises:
            ValueError: naming the document and range, micro-batch or replica that is wrong.
        """
        _check_slices(self)
        for number, replica in enumerate(self.replicas):
            for pass_name, groups in (("forward", replica.forward), ("backward", replica.backward)):
                _check_groups(self, number, replica, pass_name, groups)
        _check_order(self)
        _check_merged(self)
        if self.target_tokens < 0 or self.target_tokens > self.tokens:
            raise ValueError(
                f"step {self.step}: target_tokens={self.target_tokens} is not between 0 and the"
                f" step's {self.tokens} tokens."
            )
        return self

    def to_json(self) -> str:
        """The plan as one line of canonical JSON; :meth:`from_json` is its inverse."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> StepPlan:
        """Read what :meth:`to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields["pieces"] = tuple(Piece(*piece) for piece in fields["pieces"])
        fields["replicas"] = tuple(
            ReplicaPlan(
                slices=tuple(Slice(*piece) for piece in replica["slices"]),
                forward=_groups_from_json(replica["forward"]),
                backward=_groups_from_json(replica["backward"]),
            )
            for replica in fields["replicas"]
        )
        return StepPlan(**fields)

    @cached_property
    def digest(self) -> int:
        """63-bit fingerprint: equal on two ranks if and only if they hold the same plan."""
        sha = hashlib.sha256(self.to_json().encode()).digest()
        return int.from_bytes(sha[:8], "big") >> 1

    def __str__(self) -> str:
        lines = [
            f"step {self.step} (epoch {self.epoch}{', drain' if self.drain else ''}):"
            f" {self.tokens} tokens, {self.target_tokens} targets, cap {self.cap},"
            f" delay mean {self.delay:.2f} max {self.max_delay}"
        ]
        for number, replica in enumerate(self.replicas):
            for pass_name, groups in (("forward", replica.forward), ("backward", replica.backward)):
                if pass_name == "backward" and groups == symmetric_backward(
                    replica.slices, replica.forward
                ):
                    continue
                for index, group in enumerate(groups):
                    shown = " ".join(str(piece) for piece in replica.slices_of(group))
                    shared = "" if len(group.replicas) == 1 else f" shared by {group.replicas}"
                    lines.append(
                        f"  replica {number} {pass_name} {index}:"
                        f" {replica.tokens_of(group)} tokens, {group.sharding},"
                        f" {group.rows} rows per rank{shared}: {shown}"
                    )
        return "\n".join(lines)


def symmetric_backward(
    slices: Sequence[Slice], forward: Sequence[MicroBatch]
) -> tuple[MicroBatch, ...]:
    """The backward order that mirrors ``forward``: first in, first out, but for shared pieces.

    Micro-batches that share a piece form a chain, whose backward runs in reverse order, because
    a slice's keys and values receive gradients from every later slice (SlimPack §4.1). Without
    slicing every chain has one link and backward runs in the order of forward.
    """
    last_of_piece: dict[tuple[int, int], int] = {}
    for index, group in enumerate(forward):
        for number in group.slices:
            last_of_piece[slices[number].document, slices[number].origin] = index
    order: list[MicroBatch] = []
    chain: list[MicroBatch] = []
    end = -1
    for index, group in enumerate(forward):
        chain.append(group)
        for number in group.slices:
            end = max(end, last_of_piece[slices[number].document, slices[number].origin])
        if index >= end:
            order.extend(reversed(chain))
            chain = []
    return tuple(order)


def _groups_from_json(groups: Iterable[dict[str, Any]]) -> tuple[MicroBatch, ...]:
    return tuple(
        MicroBatch(
            slices=tuple(group["slices"]),
            sharding=group["sharding"],
            rows=group["rows"],
            replicas=tuple(group["replicas"]),
        )
        for group in groups
    )


def _check_slices(plan: StepPlan) -> None:
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


def _check_pieces(plan: StepPlan) -> None:
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
    plan: StepPlan, number: int, replica: ReplicaPlan, pass_name: str, groups: Sequence[MicroBatch]
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


def _check_order(plan: StepPlan) -> None:
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


def _check_merged(plan: StepPlan) -> None:
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
