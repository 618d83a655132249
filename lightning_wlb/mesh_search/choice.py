"""The answer of a search: meshes best first, what was left out, and why, as plain data.

Times are predicted from a device profile. Everything has a JSON form, :meth:`.MeshChoice.to_json`,
and :meth:`.MeshChoice.from_json` is its inverse, so that one rank may search and others read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_wlb.mesh import Mesh


@dataclass(frozen=True)
class MeshRow:
    """One mesh with its simulated steps.

    Args:
        mesh: with its virtual stages.
        schedule: of the pipeline.
        activation_checkpointing: as it was asked for: a name, or ``"auto"``, with which each
            micro-batch has its own.
        recomputed: share of the tokens whose micro-batches compute anything again.
        by_profile: whether plans were chosen by the device profile; else by exact work.
        steps_ns: time of all simulated steps.
        steps: how many these are.
        tokens: that they train on.
        flops: their model FLOPs, recomputation left out.
        peak_bytes: of the fullest rank in the fullest step.
        shares: of the ranks' time, by what it is spent on beside arithmetic; see
            :data:`~lightning_wlb.mesh_search.evaluate.LOSSES`.
    """

    mesh: Mesh
    schedule: str
    activation_checkpointing: str
    recomputed: float
    by_profile: bool
    steps_ns: int
    steps: int
    tokens: int
    flops: int
    peak_bytes: int
    shares: Mapping[str, float]

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step, on average."""
        return self.steps_ns / self.steps / 1e6

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.tokens * 1e9 / self.steps_ns

    def times(self, other: MeshRow) -> float:
        """Its time over that of another row, for as much work."""
        return (self.steps_ns / self.flops) / (other.steps_ns / other.flops)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait for each other in the pipeline."""
        return self.shares["pipeline bubble"]

    @property
    def bound_by(self) -> str:
        """What takes most of the time beside arithmetic."""
        return max(self.shares, key=lambda name: (self.shares[name], name))

    @property
    def sizes(self) -> str:
        """Sizes of the axes, as ``lightning-wlb plan --mesh`` takes them."""
        return ",".join(map(str, self.mesh.shape))

    @property
    def figures(self) -> dict[str, Any]:
        """Plain data, derived figures included."""
        derived = ("step_ms", "tokens_per_second", "bubble", "bound_by")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class LeftOut:
    """Meshes that are not among the rows.

    Args:
        reason: why, in words.
        count: how many.
        example: one of them, as ``--mesh`` takes it, with its virtual stages where it has any.
    """

    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class MeshChoice:
    """Which mesh to take.

    Args:
        rows: planned by the device profile, best first; at least one.
        others: planned by exact work only, best first; perhaps on fewer steps.
        left_out: not simulated, or too large for memory when simulated.
        digest: of the request, :attr:`.MeshRequest.digest`.
    """

    rows: tuple[MeshRow, ...]
    others: tuple[MeshRow, ...]
    left_out: tuple[LeftOut, ...]
    digest: str

    @property
    def best(self) -> MeshRow:
        """The mesh to take."""
        return self.rows[0]

    def best_by(self, axis: str) -> dict[int, MeshRow]:
        """The best mesh with each size of an axis (``"virtual_stages"`` counts as one).

        Where none of a size was planned by profile, the best that was planned by work.
        """
        found: dict[int, MeshRow] = {}
        for row in self.rows + self.others:
            found.setdefault(getattr(row.mesh, axis), row)
        return dict(sorted(found.items()))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> MeshChoice:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: text that it did not write.
        """
        try:
            made = json.loads(text)
            rows, others = (
                tuple(MeshRow(**{**row, "mesh": Mesh(**row["mesh"])}) for row in made[name])
                for name in ("rows", "others")
            )
            left_out = tuple(LeftOut(**each) for each in made["left_out"])
            return MeshChoice(rows, others, left_out, made["digest"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the answer of a mesh search: {error!r}.") from error


def name_of(mesh: Mesh) -> str:
    """A mesh as ``--mesh`` takes it, with its virtual stages where it has any."""
    virtual = f" with {mesh.virtual_stages} virtual stages" if mesh.virtual_stages > 1 else ""
    return ",".join(map(str, mesh.shape)) + virtual
