"""Messages of layers behind products: the page of what was measured and simulated.

*Measured.* Two ranks, tensor or context parallel, ran layers of the reference decoder over a link
of a rate at which a message takes as long as the shortest product beside it, and over the machine's
own loopback. Products slept for the time that they would take on a device of a given rate, as on a
GPU that leaves the host's core alone. Three in turn, in rounds: waiting for each message
(``overlap="off"``; of keys, with queries computed before and outputs projected behind attention),
with messages behind products (``"auto"``), and with messages that arrive at once. Context-parallel
ranks had a whole piece, or a slice that a later one reads. What is hidden is the part of the time
of messages, off less the last, that auto does not take. Beside it stands what
:mod:`lightning_wlb.cost.overlap` predicts from the two rates. Figures are medians over rounds of
wall-clock time. Processor time is that of both ranks with real products over loopback.

*Simulated*, with a shipped profile: SlimPack's settings (:mod:`benchmarks.slimpack_paper`), and the
405B model on 8,192 and 16,384 GPUs whose speed is published (:mod:`benchmarks.published`), with
messages in the open and behind products. Of keys there is what steps of ``auto`` would take with
all messages in the open, as the package predicts them; behind products where pieces are whole
(before slices did so too); behind products everywhere; if attention of a rank's queries on its own
keys ran beside them too, by 1/CP of the kernel's time; and without them.

All is kept in ``results/overlap.json``. What made it was last in this file, ``exposed.py`` and
``overlap_measured.py`` in the commit "Results of messages behind products, with keys and Hugging
Face blocks", and needs the other benchmarks of commit 128ffc7a. ``python -m benchmarks.overlap``
prints the page, and writes it.
"""

from __future__ import annotations

from typing import Any

from benchmarks import report

WAYS = ("off", "auto", "computed")
FLOPS = 3e8  # of the device that products slept for
REAL = 8  # times as many rows where products are computed


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
        "Keys, time of a step of `auto` over that with all messages of keys in the open:",
        "",
        *report.markdown_table(KEYS, keys_cells(result["keys"])),
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
    "axis", "link", "pass", "parts", "off (ms)", "auto (ms)", "computed (ms)", "auto / off",
    "hidden", "predicted",
)  # fmt: skip
KEYS = (
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


def keys_cells(rows: dict[str, dict[str, float]]) -> list[list[str]]:
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
    report.write_page("overlap", __doc__, markdown, argv)


if __name__ == "__main__":
    main()
