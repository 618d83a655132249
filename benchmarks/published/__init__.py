"""Measurements that others published, as tables of facts, and what this package predicts of each.

A class of facts (:data:`CLASSES`) is a CSV file beside this one and a module of the same name,
whose ``predict(fact)`` returns what the package's models say with the shipped profile that the row
names, in the row's unit. ``sources.csv`` says where each fact stands, so that a reader can look it
up. Only figures that stand in text or in data files are taken over; none is read off a picture.

A fact has one of three roles: ``fit`` (a constant of a profile or of a model was chosen by it: it
is left out of the errors), ``judge``, or ``lot``. Sources of the last role were drawn by lot before
anything was mended, and their errors were computed only when all mending was done. The rule of the
lot: of the sources that have facts of kernels (attention, kernels) the two, and of those that have
facts of systems only (collectives, steps) the one, with the smallest SHA-256 of the id in
hexadecimal. Sources that a profile had been fitted to, or whose errors were known before the draw
(``known_before`` in ``sources.csv``), do not take part. An id is the arXiv number, the owner and
name of the repository, or the host and path of the page, so that nobody chooses it.

:func:`drawn` applies the rule; ``python -m benchmarks.published`` compares.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

CLASSES = ("attention", "kernels", "collectives", "steps")

ROLES = ("fit", "judge", "lot")

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Source:
    """Where facts stand.

    Args:
        id: the arXiv number, the repository, or the page.
        title: of the paper, the file or the page.
        url: opens it, at a commit or a version where there is one.
        date: of that version, ISO 8601.
        software: the versions that were measured, as far as they are said.
        known_before: whether a profile was fitted to it, or its errors known, before the draw.
        role: of its facts that do not say otherwise.
    """

    id: str
    title: str
    url: str
    date: str
    software: str
    known_before: bool
    role: str


@dataclass(frozen=True)
class Fact:
    """One published figure.

    Args:
        kind: its class, one of :data:`CLASSES`.
        source: where it stands.
        role: of this fact: its own, or its source's.
        value: the figure.
        unit: ``"ms"``, ``"TFLOP/s"``, ``"tokens/s/GPU"``, ``"GiB"``, ...; a higher figure of a unit
            that ends in ``/s`` or ``/s/GPU`` is a shorter time.
        sizes: the row's other columns as they are written.
    """

    kind: str
    source: Source
    role: str
    value: float
    unit: str
    sizes: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.sizes[column]

    def number(self, column: str, default: int | None = None) -> int:
        """A whole number of the row; ``default`` where the column is empty."""
        text = self.sizes.get(column, "")
        if not text and default is not None:
            return default
        return int(text)


def sources() -> dict[str, Source]:
    """All sources by id."""
    return {
        row["id"]: Source(**row | {"known_before": row["known_before"] == "yes"})
        for row in _rows(_FOLDER / "sources.csv")
    }


def facts(kind: str) -> list[Fact]:
    """All facts of a class, in the order of its table."""
    known = sources()
    made = []
    for row in _rows(_FOLDER / f"{kind}.csv"):
        source = known[row.pop("source")]
        role = row.pop("role") or source.role
        value, unit = float(row.pop("value")), row.pop("unit")
        made.append(Fact(kind, source, role, value, unit, row))
    return made


def drawn() -> set[str]:
    """Ids of the sources that the lot falls on."""
    kernels = {fact.source.id for kind in CLASSES[:2] for fact in facts(kind)}
    systems = {fact.source.id for kind in CLASSES[2:] for fact in facts(kind)} - kernels
    result: set[str] = set()
    for group, places in ((kernels, 2), (systems, 1)):
        free = [each for each in group if not sources()[each].known_before]
        result.update(sorted(free, key=lambda each: sha256(each.encode()).hexdigest())[:places])
    return result


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
