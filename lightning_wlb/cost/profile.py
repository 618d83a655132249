"""The speed of a device as one JSON file: rates, bandwidths, latencies, and their sources.

A profile is *measured* (``lightning-wlb profile`` ran the real kernels and layers) or *analytic*
(published figures from ``sources``), and its predictions say which. Rates are achieved, not peak.

A profile leaves out contention: do not use it for ranks on one core or collectives on one link.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from lightning_wlb.argument_checks import check_names, choice, number, whole
from lightning_wlb.cost.rates import AttentionTable, LinearTable, check_positive
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.file_checks import parse_json, read_bytes

FORMAT = 2
_FOLDER = "profiles"
_TEXTS = ("name", "device", "device_type", "dtype", "date", "kernel", "sources")
_OPTIONAL = ("sliding_window", "layer_shapes")  # of the shape that was measured
_LARGE = ("forward", "backward", "peak_flops")
_LEAST, _MOST, _MOST_NS = 1e4, 1e18, 1e12
"""Least rate, most of any number, most of a time. Beyond these a unit was mistaken (TFLOP/s, GB,
seconds), or sums of times or the number of rows that fit into memory exceed 64 bits."""
_BOUNDS = {
    "memory_bytes": (1e4, 1e13),
    **dict.fromkeys(("row_ns", "parameter_ns"), (0, 1e6)),
    **dict.fromkeys(("eager_factor", "slowed_beside", "sustained"), (1e-4, 1e4)),
}


@dataclass(frozen=True)
class ActionOverhead:
    """Time of a pass through a stage besides layers, embedding and head: dispatch and positions."""

    ns: tuple[float, float] = (0.0, 0.0)  #: per action of any size, (forward, backward)
    row_ns: tuple[float, float] = (0.0, 0.0)  #: per row of the micro-batch, (forward, backward)
    #: per parameter of the stage's layers and head: a backward adds its gradient to the step's sum
    parameter_ns: float = 0.0


@dataclass(frozen=True)
class Link:
    """One class of connection between two devices, in one direction."""

    latency_ns: float  #: time of a hop; each step of a collective's ring is one hop
    bytes_per_second: float  #: rate at which a device sends large messages over the link
    launch_ns: float = 0.0  #: time of a collective or message besides its hops and bytes
    #: time that a large transfer loses until the link is full; a small one loses its bytes' time
    ramp_ns: float = 0.0

    def __post_init__(self) -> None:
        times = self.latency_ns, self.launch_ns, self.ramp_ns
        if min(times) < 0 or self.bytes_per_second <= 0:
            raise ValueError(
                f"device profile: a link of latency_ns, launch_ns and ramp_ns {times} and"
                f" bytes_per_second={self.bytes_per_second} is invalid."
            )

    def ns(self, hops: int, size: int) -> float:
        """Time of ``hops`` hops one after another in which a device sends ``size`` bytes in all."""
        full = size * 1e9 / self.bytes_per_second
        return hops * self.latency_ns + full + self.launch_ns + min(full, self.ramp_ns)


@dataclass(frozen=True)
class Profile:
    """One device and the links around it, in one dtype; ValueError names a field that is wrong."""

    name: str  #: the profile's name in reports
    device: str  #: the processor's model
    device_type: str  #: ``"cpu"`` or ``"cuda"``
    dtype: str  #: the dtype of the work: ``"bfloat16"``, ``"float32"``, ...
    measured: bool  #: whether the rates were measured on the device, not taken from publications
    #: sentences that say where every figure comes from, or how it was measured
    sources: tuple[str, ...]
    date: str  #: of the measurement or of the figures, ISO 8601
    #: FLOP/s of the data sheet in that dtype, to which utilisation is relative; for a device
    #: without a data sheet the highest measured rate
    peak_flops: float
    memory_bytes: int  #: of one device
    devices_per_node: int  #: devices that share the node's link
    element_bytes_per_second: float  #: memory traffic of element-wise work
    attention: tuple[AttentionTable, ...]  #: one table for each head size
    layer: LinearTable  #: matrix products of a decoder layer
    #: the output projection and the loss; backward counts three times the forward's FLOPs, because
    #: it recomputes the logits
    head: LinearTable
    #: ``"node"`` (between devices of one node) and ``"network"`` (between nodes)
    links: Mapping[str, Link]
    action: ActionOverhead  #: overhead of a pass through a stage
    #: sizes of the layers that were measured; others are extrapolated from them
    shape: Mapping[str, int]
    #: relative errors of predictions of work that no fit used. A measured profile has the errors on
    #: its own device, an analytic one by kind of work the median error against others' published
    #: figures (docs/accuracy.md)
    errors: Mapping[str, float]
    #: the attention kernel whose rates ``attention`` has, by the names of
    #: ``lightning_wlb.attention.backends.kernel_name``: ``"flash_attn 3"``, ``"cpu"``, ...
    kernel: str
    #: how much longer a layer's and the head's element-wise work takes uncompiled; 1 where
    #: ``element_bytes_per_second`` was measured on such work
    eager_factor: float
    #: share of the rates of attention and of matrix products that whole steps reach: 1 if they were
    #: measured in steps; less if kernels were measured briefly and alone, at clocks that training
    #: cannot hold under the power limit
    sustained: float
    slowed_beside: float  #: how much longer products take while a collective runs beside them

    def __post_init__(self) -> None:
        for name in ("peak_flops", "element_bytes_per_second", "eager_factor"):
            check_positive(name, [getattr(self, name)])
        number("device profile: slowed_beside", self.slowed_beside, 1)
        number("device profile: sustained", self.sustained, 0, 1, above=True)
        choice("device profile: device_type", self.device_type, ("cpu", "cuda"))
        for name in ("memory_bytes", "devices_per_node"):
            whole(f"device profile: {name}", getattr(self, name), 1)
        known = {field.name for field in fields(ModelShape)}
        if self.shape and not {"dim"} <= self.shape.keys() <= known:
            raise ValueError(
                f"device profile: shape={self.shape} has to be empty, or to have dim and others of"
                f" {', '.join(sorted(known))}."
            )
        if not self.attention:
            raise ValueError("device profile: attention has no table for any head size.")
        if "node" not in self.links:
            raise ValueError("device profile: links has no entry 'node'.")

    @property
    def provenance(self) -> str:
        """The profile's origin in words, which stand beside every figure predicted from it."""
        kind = "measured" if self.measured else "analytic (published figures, not measured)"
        on = f"{self.device}, {self.dtype}, attention by {self.kernel}"
        return f"profile {self.name}: {on}, {kind}, {self.date}"

    @property
    def accuracy(self) -> str:
        """A clause on the known errors of the predictions of an analytic profile."""
        if self.measured:
            return ""
        off = ", ".join(f"{error:.0%} ({work})" for work, error in self.errors.items())
        known = f": others' published figures of such devices were missed by {off} in the median"
        return (
            f"which is not measured{known if off else ''}, none of this package (docs/accuracy.md)"
        )

    def attention_table(self, head_dim: int) -> AttentionTable:
        """The table of the head size nearest to ``head_dim`` by ratio; in a tie the larger."""
        return min(
            self.attention,
            key=lambda table: (
                max(table.head_dim, head_dim) / min(table.head_dim, head_dim),
                -table.head_dim,
            ),
        )

    def check(self, *, device_type: str | None = None, dtype: str | None = None) -> None:
        """Raise ValueError for another device or dtype than the profile's; None fits any."""
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
            ValueError: an entry is missing, unknown or out of range; the message names it.
        """
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ValueError(f"{origin} is not JSON: {error}.") from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ValueError(
                f"{origin} is not a device profile of format {FORMAT}. Run `lightning-wlb profile`."
            )
        try:
            _check_values("", values)
            values |= {name: dict(values[name]) for name in ("shape", "errors")}
            values["attention"] = tuple(_record(AttentionTable, t) for t in values["attention"])
            values["layer"] = _record(LinearTable, values["layer"])
            values["head"] = _record(LinearTable, values["head"])
            values["links"] = {name: _record(Link, v) for name, v in values["links"].items()}
            values["action"] = _record(ActionOverhead, values["action"])
            return Profile(**values | {"sources": tuple(values["sources"])})
        except KeyError as error:
            raise ValueError(f"{origin}: the entry {error} is missing.") from error
        except (TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{origin}: {error}") from error

    @staticmethod
    def load(name: str | Path) -> Profile:
        """One of :func:`shipped_profiles` by name, or the profile in the JSON file at that path.

        Raises:
            ValueError: no such profile or file, or not a profile; lists the shipped profiles.
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
    check_names(kind.__name__, values, [item.name for item in fields(kind)])
    return kind(**{name: _tuples(value) for name, value in values.items()})


def _check_values(name: str, value: Any) -> None:
    """Refuse a value of another type, control characters in texts, and numbers out of range."""
    if not f"{name}{value if isinstance(value, str) else ''}".isprintable():
        raise ValueError(f"{name!r}: {value!r:.80} has characters that cannot be printed.")
    if value is None and name in _OPTIONAL:
        return
    if isinstance(value, Mapping | list) and (name not in _TEXTS or name == "sources"):
        pairs = value.items() if isinstance(value, Mapping) else ((name, each) for each in value)
        for key, each in pairs:
            _check_values(key, each)
    elif isinstance(value, str) != (name in _TEXTS) or isinstance(value, bool) != (
        name == "measured"
    ):
        raise ValueError(f"{name}={value!r} is of another type.")
    elif value is None or (not isinstance(value, str) and not 0 <= value < math.inf):
        raise ValueError(f"{name}={value!r} must be at least 0, and finite.")
    elif not isinstance(value, str):
        large = name in _LARGE or name.endswith("bytes_per_second")
        usual = _LEAST * large, _MOST_NS if name.endswith("ns") else _MOST
        least, most = _BOUNDS.get(name, usual)
        if value and not least <= value <= most:
            raise ValueError(
                f"{name}={value!r} is not from {least:g} to {most:g}. Rates are in FLOP/s and"
                " bytes/s, times in nanoseconds, memory in bytes."
            )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
