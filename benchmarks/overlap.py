"""Tensor-parallel messages behind products: measured over a slow link, and simulated.

*Measured.* Two ranks, tensor parallel, run layers of the reference decoder over a link of a rate at
which a message takes as long as the shortest product beside it (nodes of
:mod:`benchmarks.slow_link`; needs root), and over the machine's own loopback. Products sleep for
the time that they would take on a device of a given rate, as on a GPU that leaves the host's core
alone: so a machine whose cores others use too can say how much is hidden. Three in turn, in rounds:
waiting for each message (``overlap="off"``), with messages behind products (``"auto"``), and with
messages that arrive at once. What is hidden is the part of the time of messages, off less the last,
that auto does not take. Beside it stands what :mod:`lightning_wlb.cost.overlap` predicts from the
two rates. Figures are medians over rounds of wall-clock time. Processor time is that of both ranks
with real products over loopback. Sleeping ranks run with real-time priority.

*Simulated*, with a shipped profile: SlimPack's settings (:mod:`benchmarks.slimpack_paper`), and the
405B model on 8,192 and 16,384 GPUs whose speed is published (:mod:`benchmarks.published`), with
messages in the open and behind products.

Run ``python -m benchmarks.overlap``. Prints tables and, last, one JSON object.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import report, slow_link
from benchmarks.paper_speedups import without_communication
from benchmarks.published import facts
from benchmarks.published.steps import equal_documents, predict, simulated
from benchmarks.ranks import free_port, run_ranks
from benchmarks.slimpack_paper import CORPORA, Case, K
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.overlap import chunks_of, exposed_halves
from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.cost.rates import LinearTable
from lightning_wlb.data.batch import MicroBatchTensors
from lightning_wlb.distributed.process_groups import ProcessGroups
from lightning_wlb.mesh import Mesh
from lightning_wlb.models import row_products
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.tensor_parallel import shard_parameters
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.sharding import layout, rank_indices

WAYS = ("off", "auto", "computed")
CONFIG = TransformerConfig(dim=256, layers=2, heads=4, kv_heads=4, ffn_dim=768, vocab_size=256)
FLOPS = 3e8  # of the device that products sleep for
REAL = 8  # times as many rows where products are computed
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
MODELS = ("7B", "70B", "150B")


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
    """Let every message of row_products arrive at once, with this rank's own rows for all."""

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
        mock.patch.object(row_products, "all_gather_into", gathered),
        mock.patch.object(row_products, "reduce_scatter_into", scattered),
        mock.patch.object(dist, "all_gather", all_gathered),
    ):
        yield


def timed(
    rank: int, node: str | None, port: int, rows: int, chunks: int, rounds: int, real: bool
) -> Any:
    """Timings of each way on a rank, round after round; the ranks begin each pass together.

    ``real`` says whether products are computed.
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
    shard_parameters(model, mesh, model.tensor_parallel_plan(2))
    batch = micro_batch(rows)
    hidden = torch.randn(rows // 2, CONFIG.dim, requires_grad=True)
    gradient = torch.randn(rows // 2, CONFIG.dim)

    def once(way: str) -> Timing:
        count = {"off": None, "auto": chunks, "computed": 1}[way]
        groups = ProcessGroups(
            tensor=mesh.get_group(), chunks=None if count is None else lambda *_: count
        )
        with nullcontext() if real else Sleeping():
            dist.barrier()
            processor, begin = time.process_time(), time.perf_counter()
            out = model(batch, hidden, groups=groups)
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


def micro_batch(rows: int) -> MicroBatchTensors:
    """Documents of 64 tokens, so that attention is little beside products."""
    placed = layout("per_document_contiguous", [64] * (rows // 64), 1, 2)
    indices = rank_indices(placed, 0)
    return MicroBatchTensors(
        tokens=None,
        labels=None,
        positions=torch.from_numpy(indices.offset),
        attention=AttentionMetadata.from_indices(indices, placed.rows, 1),
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
    return LatencyModel(profile, CONFIG.shape, Mesh(tensor=2), overlap=True)


def predicted_shares(latency: LatencyModel, rows: int) -> dict[str, float]:
    """What part of the messages' time is predicted to be hidden in each pass."""
    open_ns = 2 * sum(latency.messages_ns(rows))
    halves = exposed_halves(latency, rows)
    return {
        "forward": 1 - sum(half.forward for half in halves) / open_ns,
        "backward": 1 - sum(half.backward for half in halves) / open_ns,
    }


def measure(rows: int, rounds: int) -> dict[str, Any]:
    """Both links; each with what is hidden, measured and predicted."""
    shortest = 2 * rows * CONFIG.dim**2 / 2 / FLOPS  # the product behind attention
    rate = rows // 2 * CONFIG.dim * 4 / shortest
    result: dict[str, Any] = {"rows": rows, "rounds": rounds, "bytes_per_second": rate}
    for name in ("slow", "loopback", "real products"):
        real = name == "real products"
        cpu = Profile.load("cpu")
        latency = latency_of(rows, Link(0.0, rate) if name == "slow" else cpu.links["node"])
        if real:
            rows, latency = REAL * rows, replace(latency, profile=cpu)
        chunks, predicted = chunks_of(latency, rows), predicted_shares(latency, rows)
        given = rows, chunks, rounds, real
        with slow_link.network(mtu=60_000) if name == "slow" else nullcontext() as link:
            nodes: tuple[str | None, str | None] = (None, None)
            if link is not None:
                os.sched_setscheduler(link.thread, os.SCHED_FIFO, os.sched_param(1))
                link.rate, nodes = rate, link.nodes
            port = free_port()
            ranks = run_ranks(_on_nodes, 2, nodes, port, *given, timeout=550.0, process_group=False)
        times = medians(ranks)
        if real:
            result[name] = {way: times[way].processor for way in WAYS[:2]} | {"chunks": chunks}
            continue
        figures: dict[str, Any] = {"chunks": chunks}
        for each in ("forward", "backward"):
            off, auto, computed = (getattr(times[way], each) for way in WAYS)
            figures[each] = {f"{way}_ms": getattr(times[way], each) * 1e3 for way in WAYS}
            figures[each]["auto_over_off"] = auto / off
            if name == "slow":
                figures[each]["hidden"] = (off - auto) / (off - computed)
                figures[each]["hidden_predicted"] = predicted[each]
        result[name] = figures
    return result


def _on_nodes(rank: int, nodes: tuple[str | None, str | None], port: int, *given: Any) -> Any:
    return timed(rank, nodes[rank], port, *given)


def slimpack(models: list[str], windows: list[int], profile: Profile) -> dict[str, Any]:
    """SlimPack's settings with messages in the open and behind products, planned for each."""
    rows = {}
    for model in models:
        for window in windows:
            for name, corpus in CORPORA.items():
                case = Case(model, window * K, corpus, profile)
                off, auto = (replace(case, overlap=each).run(1, 1, 1) for each in (False, True))
                rows[f"{model} {window}K {name}"] = {
                    "time": auto["auto"]["ns_per_token"] / off["auto"]["ns_per_token"],
                    "time_best_fit": auto["best_fit"]["ns_per_token"]
                    / off["best_fit"]["ns_per_token"],
                    "communication_off": off["auto"]["communication"],
                    "communication_auto": auto["auto"]["communication"]
                    * auto["auto"]["ns_per_token"]
                    / off["auto"]["ns_per_token"],
                    "peak_gigabytes": [each["auto"]["peak_gigabytes"] for each in (off, auto)],
                }
    return rows


def published() -> list[dict[str, Any]]:
    """The published steps of 405B on a thousand devices and more, and what is left of the gap."""
    rows = []
    for fact in facts("steps"):
        if fact["model"] != "llama-3.1-405b" or fact.unit != "TFLOP/s/GPU":
            continue
        theirs, before = simulated(fact)
        published_ns = before.simulations[0].total_ns * predict(fact) / fact.value
        recompute = fact["recompute"]
        replica = equal_documents(
            *(int(fact.number(name)) for name in ("sequence", "sequences", "micro_batches")),
            theirs.latency.mesh,
            recompute,  # type: ignore[arg-type]
        )

        latency = theirs.latency
        silent = without_communication(latency.profile)
        (off_ns, _), (auto_ns, idle_ns), (bare_ns, bare_idle_ns) = (
            _step_ns(replace(theirs, latency=replace(latency, **change)), replica)
            for change in ({}, {"overlap": True}, {"profile": silent})
        )
        rows.append({
            "where": fact["where"],
            "off_over_published": off_ns / published_ns,
            "auto_over_published": auto_ns / published_ns,
            "auto_over_off": auto_ns / off_ns,
            "no_messages_over_published": bare_ns / published_ns,
            "bubble_share": idle_ns / auto_ns,
            "no_messages_no_bubble_over_published": (bare_ns - bare_idle_ns) / published_ns,
        })  # fmt: skip
    return rows


def _step_ns(predictor: Predictor, replica: ReplicaPlan) -> tuple[int, float]:
    """A step of one replica, and how long its pipeline ranks wait in it."""
    (simulation,) = predictor.simulate([replica]).simulations
    return simulation.total_ns, sum(simulation.idle_ns) / len(simulation.idle_ns)


def markdown(result: dict[str, Any]) -> str:
    """The tables as a page."""
    lines = [
        "# Messages behind products",
        "",
        f"See `benchmarks/overlap.py`. {result['machine']}.",
        "",
    ]
    if measured := result.get("measured"):
        lines += [
            f"Two ranks, tensor parallel, {measured['rows']} rows, medians of"
            f" {measured['rounds']} rounds in turn, wall-clock. Products sleep for as long as they"
            f" would take at {FLOPS / 1e9:g} GFLOP/s, and a message of the slow link takes as long"
            " as the shortest product beside it. Computed: the same with messages that arrive at"
            f" once. Processor time of both ranks with real products of {REAL} times the rows,"
            f" {measured['real products']['chunks']} parts, auto / off:"
            f" {measured['real products']['auto'] / measured['real products']['off']:.3f}.",
            "",
            *report.markdown_table(MEASURED, measured_cells(measured)),
            "",
        ]
    lines += [
        f"Simulated, {result['provenance']}. Time of a step with messages behind products over that"
        " with messages in the open, each planned for itself; communication as a share of the"
        " latter step. Where less is held, less is recomputed, which fills the memory again and is"
        " why some times fall by more than communication. What is left of communication: the"
        " first part of each message, products that are slower beside messages (by 1.19), sums of"
        " float32 that take longer than attention's output product, keys, and pipeline messages.",
        "",
        *report.markdown_table(SIMULATED, simulated_cells(result["slimpack"])),
        "",
        "405B, time of a step simulated over published; without any message; and without bubble"
        " too. Neither schedule nor hidden messages of these runs are published: 1F1B with one"
        " stage a rank is simulated, whose bubble is most of what is left of the gap, since without"
        " it the simulated step is the shorter one.",
        "",
        *report.markdown_table(PUBLISHED, published_cells(result["published"])),
    ]
    return "\n".join(lines) + "\n"


MEASURED = (
    "link", "pass", "parts", "off (ms)", "auto (ms)", "computed (ms)", "auto / off", "hidden",
    "predicted",
)  # fmt: skip
SIMULATED = (
    "case", "time", "time, best-fit", "communication off", "auto", "GB off", "auto",
)  # fmt: skip
PUBLISHED = (
    "run", "off", "auto", "auto / off", "no messages", "bubble's share", "and no bubble",
)  # fmt: skip


def measured_cells(measured: dict[str, Any]) -> list[list[str]]:
    made = []
    for link in ("slow", "loopback"):
        for each in ("forward", "backward"):
            row, on = measured[link][each], measured[link]
            speed = f", {measured['bytes_per_second'] / 1e6:.1f} MB/s" if link == "slow" else ""
            made.append([
                link + speed, each, str(on["chunks"]),
                *(f"{row[f'{way}_ms']:.0f}" for way in WAYS), f"{row['auto_over_off']:.2f}",
                f"{row['hidden']:.0%}" if link == "slow" else "",
                f"{row['hidden_predicted']:.0%}" if link == "slow" else "",
            ])  # fmt: skip
    return made


def simulated_cells(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [
        [
            name, f"{row['time']:.3f}", f"{row['time_best_fit']:.3f}",
            f"{row['communication_off']:.0%}", f"{row['communication_auto']:.0%}",
            *(f"{each:.0f}" for each in row["peak_gigabytes"]),
        ]
        for name, row in rows.items()
    ]  # fmt: skip


def published_cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            row["where"], f"{row['off_over_published']:.2f}", f"{row['auto_over_published']:.2f}",
            f"{row['auto_over_off']:.2f}", f"{row['no_messages_over_published']:.2f}",
            f"{row['bubble_share']:.0%}", f"{row['no_messages_no_bubble_over_published']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("overlap", __doc__)
    parser.add_argument("--rows", type=int, default=256, help="of a micro-batch (default 256)")
    parser.add_argument("--rounds", type=int, default=12, help="0 measures nothing (default 12)")
    parser.add_argument("--profile", default="h100-fa2", help="device profile (h100-fa2)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="default: 7B 70B 150B")
    parser.add_argument("--windows", type=int, nargs="+", default=[64, 128], help="in K")
    parser.add_argument("--save", type=Path, help="also write PATH.json and PATH.md")
    arguments = parser.parse_args(argv)
    profile = Profile.load(arguments.profile)
    result: dict[str, Any] = {
        "benchmark": "overlap",
        "machine": f"{os.cpu_count()} cores, torch {torch.__version__}",
        "provenance": profile.provenance,
    }
    if arguments.rounds:
        if not slow_link.possible():
            raise SystemExit("nodes need root, /dev/net/tun and ip; --rounds 0 leaves them out.")
        result["measured"] = measure(arguments.rows, arguments.rounds)
    result["slimpack"] = slimpack(arguments.models, arguments.windows, profile)
    result["published"] = published()
    console = Console(width=160)
    if arguments.rounds:
        console.print(report.table("Measured", MEASURED, measured_cells(result["measured"]), ""))
    console.print(
        report.table(
            "Simulated", SIMULATED, simulated_cells(result["slimpack"]), profile.provenance
        )
    )
    console.print(report.table("405B", PUBLISHED, published_cells(result["published"]), ""))
    report.finish(result, arguments.save, markdown)


if __name__ == "__main__":
    main()
