"""The plan of one optimiser step, its JSON and its digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from lightning_wlb.argument_checks import flag, whole, wholes
from lightning_wlb.file_checks import unambiguous
from lightning_wlb.mesh import Rank
from lightning_wlb.plan.micro_batches import MicroBatch, Piece, ReplicaPlan, Slice
from lightning_wlb.plan.pipeline_scheme import Scheme, Schemes, rank_in
from lightning_wlb.plan.validation import check

_COUNTS = ("step", "epoch", "target_tokens", "cap", "micro_batches", "nominal_tokens")
SHOWN = 8
"""Slices of a micro-batch that are printed."""


@dataclass(frozen=True)
class StepPlan:
    """Everything that one optimiser step does, on all replicas.

    Args:
        step: optimiser step, 0-based, counted over the whole run.
        epoch: pass over the document store, 0-based.
        replicas: one plan for each data-parallel replica.
        pieces: the pieces released in this step, in a canonical order.
        target_tokens: tokens with a next-token target, over all replicas; the loss's divisor.
        cap: most new tokens of a micro-batch over its context-parallel group.
        micro_batches: N, the configured number of micro-batches of a global batch. A step may run
            fewer, as empty ones are left out; imbalance degrees then count the empty ones too. It
            may run more if the packing chooses their number.
        nominal_tokens: the configured tokens of a global batch, N times the context window.
        drain: whether the step empties queues after the epoch's last arrival.
        schemes: the scheme of each replica's pipeline; empty if the step runs on the run's mesh.
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
    schemes: Schemes = ()

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

    def place(self, rank: Rank) -> Rank:
        """The place of a rank of the mesh in this step."""
        return rank_in(self.schemes, rank.index) if self.schemes else rank

    def validate(self) -> StepPlan:
        """Return the plan itself; raises ValueError, naming what is wrong, if it cannot run."""
        check(self.step, self.replicas, self.pieces, self.cap, self.schemes)
        if not 0 <= self.target_tokens <= self.tokens:
            raise ValueError(
                f"step {self.step}: target_tokens={self.target_tokens} is not between 0 and the"
                f" step's {self.tokens} tokens."
            )
        return self

    def to_json(self) -> str:
        """The plan as one line of canonical JSON; :meth:`from_json` is its inverse."""
        # Tuples are encoded in C; `asdict` would first copy every one of them in Python.
        return json.dumps(self, default=_as_fields, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> StepPlan:
        """Read what :meth:`to_json` wrote; ValueError for values that no plan has.

        Unknown fields are ignored, because a later version may write more.
        """
        given: dict[str, Any] = json.loads(
            text,
            parse_int=_number,
            parse_float=_number,
            parse_constant=_number,
            object_pairs_hook=unambiguous,
        )
        return StepPlan(
            **{name: whole(name, given[name], 0) for name in _COUNTS},
            drain=flag("drain", given.get("drain", False)),
            pieces=tuple(Piece(*wholes("piece", each, 0)) for each in given["pieces"]),
            replicas=tuple(
                ReplicaPlan(
                    slices=tuple(Slice(*wholes("slice", part, 0)) for part in replica["slices"]),
                    forward=tuple(map(_micro_batch, replica["forward"])),
                )
                for replica in given["replicas"]
            ),
            schemes=tuple(Scheme(**scheme) for scheme in given.get("schemes", ())),
        )

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
        for number, scheme in enumerate(self.schemes):
            lines.append(f"  replica {number} on {scheme}")
        for number, replica in enumerate(self.replicas):
            for index, each in enumerate(replica.forward):
                notes = "" if len(each.replicas) == 1 else f" shared by {each.replicas}"
                if each.recompute != "none":
                    notes += f", recompute {each.recompute}"
                slices = list(map(str, replica.slices_of(each)))
                if len(slices) > SHOWN:
                    slices[SHOWN:] = [f"... and {len(slices) - SHOWN} more"]
                lines.append(
                    f"  replica {number} forward {index}: {replica.tokens_of(each)} tokens,"
                    f" {each.sharding}, {each.rows} rows per rank{notes}: {' '.join(slices)}"
                )
        return "\n".join(lines)


def _number(text: str) -> int:
    """An integer of a plan; large ones are refused, as hash collisions could be made from them."""
    if len(text) > 10 or not text.isdecimal():
        raise ValueError(f"{text[:20]} is no whole number of up to 10 digits")
    return int(text)


def _as_fields(part: Any) -> dict[str, Any]:
    """The fields of one of a plan's dataclasses, by name; empty ``schemes`` are left out.

    For readers in other languages ``backward`` is added, the micro-batches in backward order.
    """
    named = {field.name: getattr(part, field.name) for field in fields(part)}
    if isinstance(part, ReplicaPlan):
        named["backward"] = [part.forward[place] for place in part.backward]
    if named.get("schemes") == ():
        del named["schemes"]  # a plan on the run's mesh keeps its digest
    return named


def _micro_batch(values: dict[str, Any]) -> MicroBatch:
    """A micro-batch from JSON, whose lists become tuples."""
    return MicroBatch(
        wholes("slices", values["slices"], 0),
        values["sharding"],
        whole("rows", values["rows"], 0),
        wholes("replicas", values["replicas"], 0),
        values.get("recompute", "none"),
    )
