"""Layers on two ranks whose messages travel behind products, in front of them, or not at all.

See :mod:`benchmarks.overlap`, which shows what is measured here.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import slow_link
from benchmarks.ranks import free_port, run_ranks
from lightning_wlb.attention import key_exchange
from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.attention.metadata import AttentionMetadata, SliceMetadata
from lightning_wlb.attention.packed import packed_attention
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.overlap import MOST_CHUNKS, chunks_of, exposed_halves, exposed_keys
from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.cost.rates import LinearTable
from lightning_wlb.data.batch import MicroBatchTensors
from lightning_wlb.distributed.process_groups import ProcessGroups
from lightning_wlb.mesh import Mesh
from lightning_wlb.models import tensor_parallel_overlap
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.tensor_parallel import shard_parameters
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Slice
from lightning_wlb.sharding import layout, rank_indices
from lightning_wlb.sharding.sliced_indices import SlicedReplica

WAYS = ("off", "auto", "computed")
AXES = ("tensor", "context", "slices")
CONFIG = TransformerConfig(dim=256, layers=2, heads=4, kv_heads=4, ffn_dim=768, vocab_size=256)
FLOPS = 3e8  # of the device that products sleep for
REAL = 8  # times as many rows where products are computed
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


@dataclass(frozen=True)
class Timing:
    """Seconds of a forward and of a backward, and processor time of both."""

    forward: float
    backward: float
    processor: float = 0.0


class Sleeping(TorchDispatchMode):
    """Products take their time, and no processor; their values are not computed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        left, right = args[-2:]
        time.sleep(2 * left.numel() * right.shape[-1] / FLOPS)
        if len(args) == 3:
            return args[0]
        out = (kwargs or {}).get("out")
        return left.new_zeros(*left.shape[:-1], right.shape[-1]) if out is None else out


class _There:
    """A message that has arrived at once."""

    def wait(self) -> None:
        """Do not."""


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Let every message of layers arrive at once, with this rank's own rows for all."""

    def gathered(out: torch.Tensor, x: torch.Tensor, **_: Any) -> _There:
        out.view(-1, *x.shape).copy_(x)
        return _There()

    def all_gathered(out: list[torch.Tensor], x: torch.Tensor, **_: Any) -> _There:
        for each in out:
            each.copy_(x)
        return _There()

    def scattered(out: torch.Tensor, x: torch.Tensor, **_: Any) -> _There:
        out.copy_(x[: len(out)])
        return _There()

    with (
        mock.patch.object(tensor_parallel_overlap, "all_gather_into", gathered),
        mock.patch.object(tensor_parallel_overlap, "reduce_scatter_into", scattered),
        mock.patch.object(key_exchange, "all_gather_into", gathered),
        mock.patch.object(key_exchange, "reduce_scatter_into", scattered),
        mock.patch.object(dist, "all_gather", all_gathered),
    ):
        yield


def timed(
    rank: int,
    node: str | None,
    port: int,
    axis: str,
    rows: int,
    chunks: int,
    rounds: int,
    real: bool,
) -> Any:
    """Timings of each way on a rank, round after round; the ranks begin each pass together.

    ``axis`` is one of :data:`AXES`, and ``real`` says whether products are computed.
    """
    if not real:
        # They sleep nearly all the time, and have to wake up in time where others use the cores.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    if node is not None:
        slow_link.enter(node)
        os.environ.update(
            MASTER_ADDR=slow_link.ADDRESSES[0],
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME=slow_link.INTERFACE,
        )
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    model.embed = model.head = None
    model.initialise(0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    if axis == "tensor":
        shard_parameters(model, mesh, model.tensor_parallel_plan(2))
    batch, own = micro_batch(rows, axis, rank), rows // 2 if axis == "tensor" else rows
    hidden = torch.randn(own, CONFIG.dim, requires_grad=True)
    gradient = torch.randn(own, CONFIG.dim)

    def waiting(q: Any, k: Any, v: Any, project: Any, metadata: Any, groups: Any) -> Any:
        kernel = model.attention_kernel
        return project(packed_attention(q(), k, v, None, metadata, kernel, groups))

    attend = model.attend

    def once(way: str) -> Timing:
        count = {"off": None, "auto": chunks, "computed": 1}[way]
        groups = ProcessGroups(context=mesh.get_group())
        if axis == "tensor":
            groups = ProcessGroups(
                tensor=mesh.get_group(), chunks=None if count is None else lambda *_: count
            )
        model.attend = waiting if way == "off" and axis != "tensor" else attend  # type: ignore[method-assign]
        of_step = batch.with_cache(KeyValueCache())
        with nullcontext() if real else Sleeping():
            dist.barrier()
            processor, begin = time.process_time(), time.perf_counter()
            out = model(of_step, hidden, groups=groups)
            middle = time.perf_counter()
            dist.barrier()
            again = time.perf_counter()
            out.backward(gradient)
            end = time.perf_counter()
        return Timing(middle - begin, end - again, time.process_time() - processor)

    found: dict[str, list[Timing]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            if way == "computed":
                with nothing_sent():
                    timing = once(way)
            else:
                timing = once(way)
            if number:  # the first round connects and warms up
                found[way].append(timing)
    dist.destroy_process_group()
    return {way: [asdict(each) for each in of_way] for way, of_way in found.items()}


def micro_batch(rows: int, axis: str, rank: int) -> MicroBatchTensors:
    """A rank's rows of a micro-batch, in pieces so short that attention is little beside products.

    Context-parallel ranks share one, in which a slice is its first half.
    """
    lengths = [64] * (rows // 64) if axis == "tensor" else [2 * rows]
    tensor, context = (2, 1) if axis == "tensor" else (1, 2)
    placed = layout("per_document_contiguous", lengths, context, tensor)
    if axis == "slices":
        both = SlicedReplica(
            [placed, placed], [[Slice(0, 0, 0, 2 * rows)], [Slice(0, 0, 2 * rows, 4 * rows)]]
        )
        found = both.indices(0, rank)
        indices, slices = found.own, SliceMetadata(0, found.runs, found.rows, found.keeps)
    else:
        indices, slices = rank_indices(placed, rank if context > 1 else 0), None
    metadata = AttentionMetadata.from_indices(indices, placed.rows, context)
    return MicroBatchTensors(
        tokens=None,
        labels=None,
        positions=torch.from_numpy(indices.offset),
        attention=replace(metadata, slices=slices),
        rows=placed.rows,
    )


def medians(ranks: list[dict[str, list[dict[str, float]]]]) -> dict[str, Timing]:
    """The median over rounds of what the later rank took, and of the processor time of both."""
    made = {}
    for way in WAYS:
        rounds = list(zip(*(rank[way] for rank in ranks), strict=True))
        forward, backward = (
            statistics.median(max(rank[name] for rank in each) for each in rounds)
            for name in ("forward", "backward")
        )
        processor = statistics.median(sum(rank["processor"] for rank in each) for each in rounds)
        made[way] = Timing(forward, backward, processor)
    return made


def latency_of(rows: int, link: Link) -> LatencyModel:
    """The latency model of these layers, with this link between the ranks."""
    products = LinearTable((rows,), (FLOPS,), (FLOPS,))
    profile = replace(Profile.load("cpu"), layer=products, sustained=1.0, links={"node": link})
    return LatencyModel(profile, CONFIG.shape, Mesh(tensor=2), overlap="all")


def predicted_shares(latency: LatencyModel, rows: int) -> dict[str, float]:
    """What part of the messages' time is predicted to be hidden in each pass."""
    open_ns = 2 * sum(latency.messages_ns(rows))
    halves = exposed_halves(latency, rows)
    return {
        "forward": 1 - sum(half.forward for half in halves) / open_ns,
        "backward": 1 - sum(half.backward for half in halves) / open_ns,
    }


def predicted_shares_of_keys(latency: LatencyModel, rows: int) -> dict[str, float]:
    """The same of messages of keys, with ``rows`` rows on each of two context-parallel ranks."""
    latency = replace(latency, mesh=Mesh(context=2))
    there, back = (latency.exchange_keys_ns(rows, 0, backward=each) for each in (False, True))
    fetched, summed, again = exposed_keys(latency, rows, there, back)
    return {"forward": 1 - fetched / there, "backward": 1 - (summed + again) / (there + back)}


def measure(rows: int, rounds: int) -> dict[str, Any]:
    """Both links and each axis; what is hidden, measured and predicted; and real products."""
    result: dict[str, Any] = {"rows": rows, "rounds": rounds, "axes": {}}
    cpu = Profile.load("cpu")
    for axis in AXES:
        given = rows if axis == "tensor" else rows // 2
        # The product behind attention on tensor-parallel ranks, and that of queries on others.
        share = 2 if axis == "tensor" else 1
        shortest = 2 * given * CONFIG.dim**2 / share / FLOPS
        rate = given * (1 if axis == "tensor" else 4) / 2 * CONFIG.dim * 4 / shortest
        made: dict[str, Any] = {"bytes_per_second": rate}
        for name in ("slow",) if axis == "slices" else ("slow", "loopback"):
            link = Link(0.0, rate) if name == "slow" else cpu.links["node"]
            latency = latency_of(rows, link)
            chunks = chunks_of(latency, rows) if axis == "tensor" else 1
            shares = predicted_shares if axis == "tensor" else predicted_shares_of_keys
            predicted = shares(latency, given)
            times = medians(_ran(name, rate, axis, given, chunks, rounds, False))
            figures: dict[str, Any] = {"chunks": chunks}
            for each in ("forward", "backward"):
                off, auto, computed = (getattr(times[way], each) for way in WAYS)
                figures[each] = {f"{way}_ms": getattr(times[way], each) * 1e3 for way in WAYS}
                figures[each]["auto_over_off"] = auto / off
                if name == "slow":
                    figures[each]["hidden"] = (off - auto) / (off - computed)
                    figures[each]["hidden_predicted"] = predicted[each]
            made[name] = figures
        result["axes"][axis] = made
    parts = {"rows": rows // 2, "rounds": rounds, "forward": {}}
    for chunks in (1, MOST_CHUNKS):  # what more parts than pay would take
        times = medians(_ran("loopback", 0.0, "tensor", rows // 2, chunks, rounds, False))
        parts["forward"][str(chunks)] = {f"{way}_ms": times[way].forward * 1e3 for way in WAYS[:2]}
    result["loopback_parts"] = parts
    rows = REAL * rows
    chunks = chunks_of(replace(latency_of(rows, cpu.links["node"]), profile=cpu), rows)
    times = medians(_ran("loopback", 0.0, "tensor", rows, chunks, rounds, True))
    result["real products"] = {way: times[way].processor for way in WAYS[:2]} | {"chunks": chunks}
    return result


def _ran(name: str, rate: float, *given: Any) -> list[Any]:
    """:func:`timed` on both ranks, over a link of this rate where the link is the slow one."""
    with slow_link.network(mtu=60_000) if name == "slow" else nullcontext() as link:
        nodes: tuple[str | None, str | None] = (None, None)
        if link is not None:
            os.sched_setscheduler(link.thread, os.SCHED_FIFO, os.sched_param(1))
            link.rate, nodes = rate, link.nodes
        port = free_port()
        return run_ranks(_on_nodes, 2, nodes, port, *given, timeout=550.0, process_group=False)


def _on_nodes(rank: int, nodes: tuple[str | None, str | None], port: int, *given: Any) -> Any:
    return timed(rank, nodes[rank], port, *given)
