"""What a device can do, as one JSON file: rates, bandwidths, latencies, and where they come from.

A profile is *measured* (``lightning-wlb profile`` ran the real kernels and layers on the device)
or *analytic* (published figures, named in ``sources``), and everything that predicts from it says
which. Rates are achieved, not peak.

Between the points of a table the *inverse* rate is interpolated linearly over 1/queries, 1/(keys
per query) and 1/rows, which is exact for a time of the form a + b·queries·keys. Only the four
operations of arithmetic are used, which IEEE 754 makes equal on every processor.

A profile knows nothing of contention: do not use it for ranks that share a core, nor for
collectives that share a link.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_wlb.file_checks import parse_json, read_bytes

Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

FORMAT = 1
_FOLDER = "profiles"


@dataclass(frozen=True)
class AttentionTable:
    """Achieved FLOP/s of the attention kernel for one head size (WLB-LLM §5.3).

    FLOPs are those of :func:`lightning_wlb.cost.flops.causal_pairs` with the queries rounded up to
    the tile; backward counts 2.5 times the forward's.

    Args:
        head_dim: width of one head.
        tile: queries that the kernel rounds a segment up to; 1 where it does not.
        queries: queries of a segment, ascending.
        keys_per_query: keys of a segment over its queries, ascending from 1.
        forward: FLOP/s of the forward pass, [queries][keys_per_query].
        backward: FLOP/s of the backward pass, [queries][keys_per_query].
        call_ns: time of a kernel call besides its segments, (forward, backward).
        at_once: tiles of one head that the device works on at the same time, (forward, backward);
            1 where a call takes as long as its segments together, however few.
    """

    head_dim: int
    tile: int
    queries: tuple[int, ...]
    keys_per_query: tuple[float, ...]
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    call_ns: tuple[float, float] = (0.0, 0.0)
    at_once: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        _check_axis("attention.queries", self.queries)
        _check_positive("attention.at_once", self.at_once)
        _check_axis("attention.keys_per_query", self.keys_per_query)
        _check_positive("attention.tile, attention.head_dim", (self.tile, self.head_dim))
        for name, table in (("forward", self.forward), ("backward", self.backward)):
            shape = [len(row) for row in table]
            if shape != [len(self.keys_per_query)] * len(self.queries):
                raise ValueError(
                    f"device profile: attention.{name} has rows of {shape} entries, but the axes"
                    f" ask for {len(self.queries)} rows of {len(self.keys_per_query)}."
                )
            for row in table:
                _check_positive(f"attention.{name}", row)

    def inverse_rates(self, queries: Integers, keys: Integers) -> _Floats:
        """Seconds per FLOP of segments; beyond an end of the table they are as at that end.

        Args:
            queries: int64 [segments].
            keys: int64 [segments].

        Returns:
            float64 [2 (forward, backward), segments].
        """
        inverse = _inverse(self.forward, self.backward)
        row, row_weight = _cell(queries.astype(np.float64), self.queries)
        column, column_weight = _cell(keys / queries, self.keys_per_query)
        next_row = np.minimum(row + 1, inverse.shape[1] - 1)
        next_column = np.minimum(column + 1, inverse.shape[2] - 1)
        low, high = (
            inverse[:, at, column] * column_weight
            + inverse[:, at, next_column] * (1.0 - column_weight)
            for at in (row, next_row)
        )
        result: _Floats = low * row_weight + high * (1.0 - row_weight)
        return result


@dataclass(frozen=True)
class LinearTable:
    """Achieved FLOP/s of matrix products by rows: a short micro-batch has a lower utilisation.

    Args:
        rows: ascending; a call on fewer rows than the first takes as long as on the first.
        forward: FLOP/s of the forward pass at each number of rows.
        backward: FLOP/s of the backward pass, of twice the FLOPs.
    """

    rows: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis("rows", self.rows)
        for name, values in (("forward", self.forward), ("backward", self.backward)):
            if len(values) != len(self.rows):
                raise ValueError(
                    f"device profile: {name} has {len(values)} rates for {len(self.rows)} numbers"
                    " of rows."
                )
            _check_positive(name, values)

    def seconds(self, flops: int, rows: int, *, backward: bool) -> float:
        """Time of so many FLOPs on so many rows."""
        if rows == 0 or flops == 0:
            return 0.0
        axis, rates = self.rows, self.backward if backward else self.forward
        if rows < axis[0]:
            return flops / rows * axis[0] / rates[0]
        if rows >= axis[-1]:
            return flops * (1.0 / rates[-1])
        index = bisect_right(axis, rows) - 1
        low, high = 1.0 / axis[index], 1.0 / axis[index + 1]
        weight = (1.0 / rows - high) / (low - high)
        return flops * (weight / rates[index] + (1.0 - weight) / rates[index + 1])


@dataclass(frozen=True)
class ActionOverhead:
    """What a pass through a stage takes besides its layers and ends: dispatch and positions.

    Args:
        ns: per action of any size, (forward, backward).
        row_ns: per row of the micro-batch, (forward, backward).
        parameter_ns: per parameter of the stage's layers and head, in a backward: its gradient is
            added to the sums of the step.
    """

    ns: tuple[float, float] = (0.0, 0.0)
    row_ns: tuple[float, float] = (0.0, 0.0)
    parameter_ns: float = 0.0

    def __add__(self, other: ActionOverhead) -> ActionOverhead:
        def add(one: tuple[float, float], two: tuple[float, float]) -> tuple[float, float]:
            return one[0] + two[0], one[1] + two[1]

        parameter_ns = self.parameter_ns + other.parameter_ns
        return ActionOverhead(add(self.ns, other.ns), add(self.row_ns, other.row_ns), parameter_ns)


@dataclass(frozen=True)
class Link:
    """One class of connection between two devices, in one direction.

    Args:
        latency_ns: time of a hop, as each step of a collective's ring is one.
        bytes_per_second: what a device sends over the link with large messages.
        launch_ns: time of a collective or message besides its hops and bytes.
        ramp_ns: what a large transfer loses until the link is full; a small one loses as much as
            its bytes take.
    """

    latency_ns: float
    bytes_per_second: float
    launch_ns: float = 0.0
    ramp_ns: float = 0.0

    def __post_init__(self) -> None:
        times = self.latency_ns, self.launch_ns, self.ramp_ns
        if min(times) < 0 or self.bytes_per_second <= 0:
            raise ValueError(
                f"device profile: a link of latency_ns, launch_ns and ramp_ns {times} and"
                f" bytes_per_second={self.bytes_per_second} is none."
            )

    def ns(self, hops: int, size: int) -> float:
        """Time of ``hops`` hops one after another in which a device sends ``size`` bytes in all."""
        full = size * 1e9 / self.bytes_per_second
        return hops * self.latency_ns + full + self.launch_ns + min(full, self.ramp_ns)


@dataclass(frozen=True)
class Profile:
    """One device and the links around it, in one dtype.

    Args:
        name: the profile's name in reports.
        device: the processor's model.
        device_type: ``"cpu"`` or ``"cuda"``.
        dtype: the dtype of the work: ``"bfloat16"``, ``"float32"``, ...
        measured: whether the rates were measured on the device, not taken from publications.
        sources: sentences that say where every figure comes from, or what was measured how.
        date: of the measurement or of the figures, ISO 8601.
        peak_flops: FLOP/s of the data sheet in that dtype, which utilisation is relative to; for
            a device without a data sheet the highest rate measured.
        memory_bytes: of one device.
        devices_per_node: how many share the node's link.
        element_bytes_per_second: memory traffic of element-wise work.
        eager_factor: how much longer a layer's and the head's element-wise work takes uncompiled;
            1 where ``element_bytes_per_second`` was measured on such work.
        sustained: share of the rates of attention and of matrix products that whole steps reach: 1
            where they were measured in steps, less where kernels were measured alone and briefly,
            at clocks that the power limit lets no training hold.
        attention: one table for each head size.
        layer: matrix products of a decoder layer.
        head: the output projection and the loss; backward counts three times the forward's
            FLOPs, because it recomputes the logits.
        action: overhead of a pass through a stage.
        links: ``"node"`` (between devices of one node) and ``"network"`` (between nodes).
        versions: of the software that was measured.
        shape: sizes of the layers that were measured; others are extrapolated from them.
        errors: relative errors of the fitted rates on work that the fit did not use.
        kernel: the attention kernel whose rates ``attention`` has, by the names of
            ``lightning_wlb.attention.backends.kernel_name``: ``"flash_attn 3"``, ``"cpu"``, ...;
            empty in files of older versions, which did not say.

    Raises:
        ValueError: naming the field that is wrong.
    """

    name: str
    device: str
    device_type: str
    dtype: str
    measured: bool
    sources: tuple[str, ...]
    date: str
    peak_flops: float
    memory_bytes: int
    devices_per_node: int
    element_bytes_per_second: float
    attention: tuple[AttentionTable, ...]
    layer: LinearTable
    head: LinearTable
    links: Mapping[str, Link]
    action: ActionOverhead = field(default_factory=ActionOverhead)
    versions: Mapping[str, str] = field(default_factory=dict)
    shape: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    kernel: str = ""
    eager_factor: float = 1.0
    sustained: float = 1.0

    def __post_init__(self) -> None:
        for name in ("peak_flops", "memory_bytes", "devices_per_node"):
            _check_positive(name, [getattr(self, name)])
        for name in ("element_bytes_per_second", "eager_factor", "sustained"):
            _check_positive(name, [getattr(self, name)])
        if not self.attention:
            raise ValueError("device profile: attention has no table for any head size.")
        if "node" not in self.links:
            raise ValueError("device profile: links has no entry 'node'.")

    @property
    def provenance(self) -> str:
        """Measured or analytic, in words that stand beside every figure predicted from it."""
        kind = "measured" if self.measured else "analytic (published figures, not measured)"
        attention = f", attention by {self.kernel}" if self.kernel else ""
        return f"profile {self.name}: {self.device}, {self.dtype}{attention}, {kind}, {self.date}"

    def attention_table(self, head_dim: int) -> AttentionTable:
        """The table of the head size nearest to ``head_dim`` by ratio; the larger of two."""
        return min(
            self.attention,
            key=lambda table: (
                max(table.head_dim, head_dim) / min(table.head_dim, head_dim),
                -table.head_dim,
            ),
        )

    def check(self, *, device_type: str | None = None, dtype: str | None = None) -> None:
        """Refuse another device or dtype than the profile's; None fits any.

        Raises:
            ValueError: naming both, and the remedy.
        """
        for what, wanted, own in (
            ("device", device_type, self.device_type),
            ("dtype", dtype, self.dtype),
        ):
            if wanted not in (None, own):
                raise ValueError(
                    f"The device profile {self.name!r} was made for {what} {own!r}, not for"
                    f" {wanted!r}: its rates say nothing about that. Choose a profile of {what}"
                    f" {wanted!r}, or measure one there with `lightning-wlb profile`."
                )

    def to_json(self) -> str:
        """The profile as indented JSON; :meth:`from_json` is its inverse."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, origin: str = "device profile") -> Profile:
        """Read what :meth:`to_json` wrote; errors call it ``origin``.

        Raises:
            ValueError: naming what is missing, unknown or out of range.
        """
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ValueError(f"{origin} is not JSON: {error}.") from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ValueError(
                f"{origin} is not a device profile of format {FORMAT}. Make one with"
                " `lightning-wlb profile`."
            )
        try:
            values["attention"] = tuple(_record(AttentionTable, t) for t in values["attention"])
            values["layer"] = _record(LinearTable, values["layer"])
            values["head"] = _record(LinearTable, values["head"])
            values["links"] = {name: _record(Link, v) for name, v in values["links"].items()}
            values["action"] = _record(ActionOverhead, values.get("action", {}))
            return Profile(**values | {"sources": tuple(values["sources"])})
        except KeyError as error:
            raise ValueError(f"{origin}: the entry {error} is missing.") from error
        except (TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{origin}: {error}") from error

    @staticmethod
    def load(name: str | Path) -> Profile:
        """One of :func:`shipped_profiles` by name, or the profile in the JSON file at that path.

        Raises:
            ValueError: no such profile or file, or not a profile; the message lists the shipped.
        """
        if str(name) in shipped_profiles():
            file = resources.files(__package__) / _FOLDER / f"{name}.json"
            return Profile.from_json(file.read_text(encoding="utf-8"), f"device profile {name!r}")
        path = Path(name)
        try:
            text = read_bytes(path).decode()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"The device profile {str(name)!r} is neither shipped"
                f" ({', '.join(shipped_profiles())}) nor a file that can be read: {error}."
            ) from error
        return Profile.from_json(text, f"device profile {path}")


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    entries = (resources.files(__package__) / _FOLDER).iterdir()
    return sorted(Path(entry.name).stem for entry in entries if entry.name.endswith(".json"))


def _record(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass from JSON values, whose lists become tuples."""
    known = [item.name for item in fields(kind)]
    for name in values:
        if name not in known:
            raise ValueError(f"{kind.__name__} has no entry {name!r}; it has {', '.join(known)}.")
    return kind(**{name: _tuples(value) for name, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _check_axis(name: str, values: Sequence[float]) -> None:
    rising = all(low < high for low, high in pairwise(values))
    if not values or not rising or values[0] < 1:
        raise ValueError(
            f"device profile: {name}={values} must ascend strictly from at least 1, and hold a"
            " point."
        )


def _check_positive(name: str, values: Sequence[float]) -> None:
    if not all(value > 0 for value in values):
        raise ValueError(f"device profile: {name}={values} must be above 0.")


def _cell(values: _Floats, axis: tuple[float, ...]) -> tuple[Integers, _Floats]:
    """The axis point at or below each value, and its weight by 1/value; 0 weight at the next."""
    points, inverse = _points(axis)
    values = np.minimum(np.maximum(values, axis[0]), axis[-1])
    # The last point belongs to the cell before it.
    index = np.searchsorted(points[1:-1], values, side="right")
    if len(points) == 1:
        return index, np.ones(len(values))
    low, high = inverse[index], inverse[index + 1]
    return index, (1.0 / values - high) / (low - high)


@lru_cache(maxsize=64)
def _inverse(*tables: tuple[tuple[float, ...], ...]) -> _Floats:
    """1/rate of tables with equal axes, float64 [tables, ...]."""
    inverse: _Floats = 1.0 / np.array(tables, dtype=np.float64)
    return inverse


@lru_cache(maxsize=64)
def _points(axis: tuple[float, ...]) -> tuple[_Floats, _Floats]:
    """An axis and its inverse."""
    points = np.array(axis, dtype=np.float64)
    return points, 1.0 / points
