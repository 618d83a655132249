"""Messages of layers behind products: measured over a slow link, and simulated.

*Measured.* Two ranks, tensor or context parallel, run layers of the reference decoder over a link
of a rate at which a message takes as long as the shortest product beside it (nodes of
:mod:`benchmarks.slow_link`; needs root), and over the machine's own loopback. Products sleep for
the time that they would take on a device of a given rate, as on a GPU that leaves the host's core
alone: so a machine whose cores others use too can say how much is hidden. Three in turn, in rounds:
waiting for each message (``overlap="off"``; of keys, with queries computed before and outputs
projected behind attention), with messages behind products (``"auto"``), and with messages that
arrive at once. Context-parallel ranks have a whole piece, or a slice that a later one reads. What
is hidden is the part of the time of messages, off less the last, that auto does not take. Beside it
stands what :mod:`lightning_wlb.cost.overlap` predicts from the two rates. Figures are medians over
rounds of wall-clock time. Processor time is that of both ranks with real products over loopback.
Sleeping ranks run with real-time priority.

*Simulated*, with a shipped profile: SlimPack's settings (:mod:`benchmarks.slimpack_paper`), and the
405B model on 8,192 and 16,384 GPUs whose speed is published (:mod:`benchmarks.published`), with
messages in the open, behind products, and (Hugging Face blocks) with sums of rows' gradients alone
behind products.

What would be, simulated by patched predictors (``exposed.py``, last in commit 82c3f540), is kept
under ``removed``. Of keys: what steps of ``auto`` would take with all messages in the open, as the
package predicted them then; behind products where pieces are whole; behind products everywhere; if
attention of a rank's queries on its own keys ran beside them too, by 1/CP of the kernel's time; and
without them.

Run ``python -m benchmarks.overlap``. Prints tables and, last, one JSON object.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console

from benchmarks import report, slow_link
from benchmarks.overlap_measured import FLOPS, REAL, WAYS, measure
from benchmarks.paper_speedups import without_communication
from benchmarks.published import facts
from benchmarks.published.steps import equal_documents, predict, simulated
from benchmarks.slimpack_paper import Case
from benchmarks.workloads import CORPORA, K
from lightning_wlb.cost.overlap import Overlap
from lightning_wlb.cost.profile import Profile
from lightning_wlb.plan import ReplicaPlan
from lightning_wlb.prediction.predictor import Predictor

MODELS = ("7B", "70B", "150B")


def slimpack(models: list[str], windows: list[int], profile: Profile) -> dict[str, Any]:
    """SlimPack's settings with messages in the open and behind products, planned for each."""
    rows = {}
    for model in models:
        for window in windows:
            for name, corpus in CORPORA.items():
                case = Case(model, window * K, corpus, profile)
                off, late, auto = (
                    replace(case, overlap=each).run(1, 1, 1) for each in get_args(Overlap)
                )
                rows[f"{model} {window}K {name}"] = {
                    "time": auto["auto"]["ns_per_token"] / off["auto"]["ns_per_token"],
                    "time_best_fit": auto["best_fit"]["ns_per_token"]
                    / off["best_fit"]["ns_per_token"],
                    "time_hugging_face": late["auto"]["ns_per_token"] / off["auto"]["ns_per_token"],
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
            for change in ({}, {"overlap": "all"}, {"profile": silent})
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
        real, parts = measured["real products"], measured["loopback_parts"]
        ratios = {n: each["auto_ms"] / each["off_ms"] for n, each in parts["forward"].items()}
        lines += [
            f"Two ranks, {measured['rows']} rows (half of them each), medians of"
            f" {measured['rounds']} rounds in turn, wall-clock. Products sleep for as"
            f" long as they would take at {FLOPS / 1e9:g} GFLOP/s, and a message of the slow link"
            " takes as long as the shortest product beside it. Computed: the same with messages"
            " that arrive at once."
            f" Processor time of both tensor-parallel ranks with real products of {REAL} times the"
            f" rows, in {real['chunks']} part(s), auto / off: {real['auto'] / real['off']:.3f}.",
            "",
            *report.markdown_table(MEASURED, measured_cells(measured)),
            "",
            "Why rows travel in one part over loopback: a forward of"
            f" {parts['rows']} rows, auto / off, is {ratios['1']:.3f} in one part and"
            f" {ratios['4']:.3f} in four ({parts['rounds']} rounds).",
            "",
        ]
    lines += [
        f"Simulated, {result['provenance']}. Time of a step with messages behind products over that"
        " with messages in the open, each planned for itself; communication as a share of the"
        " latter step; Hugging Face: sums of rows' gradients alone are behind products. Where less"
        " is held, less is recomputed, which fills the memory again and is"
        " why some times fall by more than communication. What is left of communication: the"
        " first part of each message, products that are slower beside messages (by 1.19), sums of"
        " float32 that take longer than attention's output product, keys, and pipeline messages.",
        "",
        *report.markdown_table(SIMULATED, simulated_cells(result["slimpack"])),
        "",
    ]
    if kept := result.get(report.REMOVED):
        lines += [
            f"{kept['note']} Keys: time of a step of `auto` over that with all messages of keys in"
            " the open.",
            "",
            *report.markdown_table(KEPT, kept_cells(kept["rows"])),
            "",
        ]
    lines += [
        "405B, time of a step simulated over published; without any message; and without bubble"
        " too. Neither schedule nor hidden messages of these runs are published: 1F1B with one"
        " stage a rank is simulated, whose bubble is most of what is left of the gap, since without"
        " it the simulated step is the shorter one.",
        "",
        *report.markdown_table(PUBLISHED, published_cells(result["published"])),
    ]
    return "\n".join(lines) + "\n"


MEASURED = (
    "axis", "link", "pass", "parts", "off (ms)", "auto (ms)", "computed (ms)", "auto / off",
    "hidden", "predicted",
)  # fmt: skip
KEPT = (
    "case", "whole pieces (before)", "everywhere (now)", "and own keys", "no messages of keys",
)  # fmt: skip
SIMULATED = (
    "case", "time", "time, best-fit", "Hugging Face", "communication off", "auto", "GB off", "auto",
)  # fmt: skip
PUBLISHED = (
    "run", "off", "auto", "auto / off", "no messages", "bubble's share", "and no bubble",
)  # fmt: skip


def measured_cells(measured: dict[str, Any]) -> list[list[str]]:
    made = []
    for axis, of_axis in measured["axes"].items():
        for link in ("slow", "loopback")[: len(of_axis) - 1]:
            for each in ("forward", "backward"):
                row, on = of_axis[link][each], of_axis[link]
                speed = f", {of_axis['bytes_per_second'] / 1e6:.1f} MB/s" if link == "slow" else ""
                made.append([
                    axis, link + speed, each, str(on["chunks"]),
                    *(f"{row[f'{way}_ms']:.0f}" for way in WAYS), f"{row['auto_over_off']:.2f}",
                    f"{row['hidden']:.0%}" if link == "slow" else "",
                    f"{row['hidden_predicted']:.0%}" if link == "slow" else "",
                ])  # fmt: skip
    return made


def kept_cells(rows: dict[str, dict[str, float]]) -> list[list[str]]:
    return [[name, *(f"{each:.3f}" for each in row.values())] for name, row in rows.items()]


def simulated_cells(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [
        [
            name, *(f"{row[each]:.3f}" for each in ("time", "time_best_fit", "time_hugging_face")),
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
