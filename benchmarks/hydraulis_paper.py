"""Hydraulis' Figures 10 to 13, simulated, beside what the paper says: the page of kept simulations.

Hydraulis ("Demystifying Workload Imbalances in Large Transformer Model Training over
Variable-length Sequences") reports 1.32 to 2.66 times the throughput of the best of Megatron-LM,
DeepSpeed and HotSPa. Here the question is where such a factor comes from. The speed-up over
Megatron is a product of factors, in the order in which they are enabled. In the paper's space:
packing, then heterogeneous strategies. In ours: what meshes may be without context parallel
(recomputation where memory asks for it, virtual stages), context parallel, Hydraulis' packing,
``auto``'s, and strategies. Times compare for as much work. Where every step takes the best of all
strategies, no choice of a few can be better: such times are bounds from below.

Models, clusters, windows and tokens of a step are the paper's as far as its text gives them, with
lengths of :data:`benchmarks.workloads.CORPORA`. The paper ran on A800 GPUs, for which there is no
profile: figures are of another device, which the result names. Not simulated: HotSPa, which trains
each step on several meshes in turn; tensor parallel across nodes; ZeRO-3.

The simulations are kept in ``results/hydraulis_paper.json``. What made them
(``benchmarks/hydraulis_runs.py`` and ``hydraulis_proposal.py``) was last in commit 128ffc7a.

``python -m benchmarks.hydraulis_paper`` prints the page, and writes it and its picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import report

NOT_GIVEN = "not given in text"
GAINS = (1.32, 2.66)
"""Hydraulis over the best of its baselines, Figure 10."""
DYNAMIC = 1.44
"""Dynamic strategies over the homogeneous one with the same assignment, its Table 1."""
OTHER_THAN_FIRST = 1.6
"""S3 over S0 in most of the steps, Figure 12."""
UNEVEN = {"megatron": (0.36, 0.65), "two_stage": (0.02, 0.10)}
"""How much earlier the first rank ends than the last, Figure 12."""
PAPERS_PARTS = ("packing", "strategies")
OUR_PARTS = ("search", "context", "two-stage", "auto", "strategies")
WAYS = {
    "megatron": "Megatron",
    "deepspeed": "DeepSpeed",
    "two_stage": "two-stage",
    "best_fit, no context": "best-fit, no CP",
    "best_fit": "best-fit",
    "hydraulis, no context": "hydraulis, no CP",
    "hydraulis": "hydraulis",
    "auto, no context": "auto, no CP",
    "auto": "auto",
}

Row = Mapping[str, Any]


def mean(times: Sequence[float]) -> float:
    return sum(times) / len(times)


def best_of(steps: Row, *, alike_only: bool = False) -> list[float]:
    """Each step on the fastest of the mesh and the strategies, in ms."""
    own = [each["ms"] for each in steps["strategies"] if each["alike"] or not alike_only]
    return [
        min([time, *(other for each in own if (other := each[at]) is not None)])
        for at, time in enumerate(steps["on_mesh_ms"])
    ]


def per_work(row: Row) -> float:
    """Time for as much work; steps of all rows of a setting are as many."""
    return float(row["step_ms"] / row["flops"])


def best_baseline(static: Row) -> tuple[str, float]:
    """The fastest of the paper's baselines that are simulated, and its speed-up over Megatron."""
    fit = [name for name in ("megatron", "deepspeed") if static[name]]
    name = min(fit, key=lambda name: per_work(static[name]))
    return name, per_work(static["megatron"]) / per_work(static[name])


def papers_factors(made: Row) -> dict[str, float]:
    """Speed-up over Megatron in the paper's space, by part."""
    static, steps = made["static"], made["paper"]
    return {
        "packing": per_work(static["megatron"]) / per_work(static["two_stage"]),
        "strategies": mean(steps["on_mesh_ms"]) / mean(best_of(steps)),
    }


def our_factors(made: Row) -> dict[str, float]:
    """Speed-up over Megatron in our space, by part; that of strategies is at most this."""
    static, flops = made["static"], made["static"]["auto"]["flops"]
    ways = ("megatron", "best_fit, no context", "best_fit", "hydraulis", "auto")
    times = [per_work(static[name]) for name in ways]
    # A run whose steps would be slower elsewhere stays on the best mesh.
    times.append(min(times[-1], mean(best_of(made["dynamic"])) / flops))
    return {
        name: before / after
        for name, (before, after) in zip(OUR_PARTS, pairwise(times), strict=True)
    }


def alike(made: Row) -> float:
    """As the last of :func:`our_factors`, of strategies of equal pipelines alone."""
    row, steps = made["static"]["auto"], made["dynamic"]
    return max(row["step_ms"] / mean(best_of(steps, alike_only=True)), 1.0)


def whole(settings: Row) -> dict[str, Row]:
    """The settings of which all parts are there, with all static meshes together."""
    return {
        name: {**made, "static": {**made["static"], **made["auto"]}}
        for name, made in settings.items()
        if all(part in made for part in ("auto", "static", "paper", "dynamic"))
    }


def ablation(steps: Row) -> dict[str, float | None]:
    """Throughput of Figure 13's (a) to (d), (a) being 1."""
    first = mean(steps["packed_full_ms"])
    lasting = [
        mean(each["ms"])
        for each in steps["strategies"]
        if not each["alike"] and each["longest"] >= steps["window"] and None not in each["ms"]
    ]
    return {
        "a": 1.0,
        "b": first / mean(steps["on_mesh_ms"]),
        "c": first / min(lasting) if lasting else None,
        "d": first / mean(best_of(steps)),
    }


def chosen(steps: Row) -> Counter[str]:
    """How many steps take each strategy."""
    count: Counter[str] = Counter()
    for at, least in enumerate(best_of(steps)):
        own = [each["strategy"] for each in steps["strategies"] if each["ms"][at] == least]
        on_mesh = steps["on_mesh_ms"][at] == least
        count["the mesh " + steps["mesh"] if on_mesh else own[0]] += 1
    return count


def tables(result: Row) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Titles, headings and rows, of what is there."""
    made = whole(result["settings"])
    yield _factors_table(made)
    yield _static_table(made)
    yield _figure_10(made)
    yield _figure_11(made)
    yield _strategies_table(made)
    yield _ablation_table(made)


def _factors_table(made: Mapping[str, Row]) -> tuple[str, list[str], list[list[str]]]:
    rows = []
    for name, each in made.items():
        paper, own = papers_factors(each), our_factors(each)
        (best, least), wholes = (
            best_baseline(each["static"]),
            [prod(paper.values()), prod(own.values())],
        )
        factors = [*paper.values(), wholes[0], *own.values(), alike(each), wholes[1]]
        shown = [f"{factor:.2f}" for factor in (*factors, *(of / least for of in wholes))]
        rows.append([name, f"{WAYS[best]} {least:.2f}", *shown])
    heads = [
        "setting", "best baseline",
        *(f"paper's {part}" for part in PAPERS_PARTS), "Hydraulis",
        *OUR_PARTS, "of these equal pipelines", "ours",
        "Hydraulis over the best baseline", "ours over it",
    ]  # fmt: skip
    return "Where the speed-up over Megatron comes from, simulated", heads, rows


def _static_table(made: Mapping[str, Row]) -> tuple[str, list[str], list[list[str]]]:
    rows = [
        [
            name,
            *(
                f"{row['step_ms']:.0f}: {row['mesh'].replace(' with ', '; ')}"
                if (row := each["static"][way])
                else "does not fit"
                for way in WAYS
            ),
        ]
        for name, each in made.items()
    ]
    title = "Best static meshes (data,pipeline,context,tensor), ms per step, simulated"
    return title, ["setting", *WAYS.values()], rows


def _figure_10(made: Mapping[str, Row]) -> tuple[str, list[str], list[list[str]]]:
    least = [best_baseline(each["static"])[1] for each in made.values()]
    own, ours = (
        [
            prod(factors(each).values()) / base
            for each, base in zip(made.values(), least, strict=True)
        ]
        for factors in (papers_factors, our_factors)
    )
    strategies = [papers_factors(each)["strategies"] for each in made.values()]
    in_ours = [our_factors(each)["strategies"] for each in made.values()]

    def span(values: Sequence[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f}" if values else ""

    rows = [
        ["Hydraulis over the best baseline", "{} to {}".format(*GAINS), span(own)],
        ["of this, strategies over the best static mesh", f"{DYNAMIC} (Table 1)", span(strategies)],
        ["this package over the best baseline", "", span(ours)],
        ["of this, strategies over the best static mesh", "", span(in_ours)],
    ]
    return "Figure 10 and Table 1", ["speed-up", "paper, measured", "simulated"], rows


def _figure_11(made: Mapping[str, Row]) -> tuple[str, list[str], list[list[str]]]:
    def shown(time: float | None) -> str:
        return "does not fit" if time is None else f"{time:.0f}"

    rows = []
    for name, each in made.items():
        if not name.startswith("7B") or "GitHub" in name:
            continue
        static = each["static"]
        times = [static[way] and static[way]["step_ms"] for way in ("megatron", "deepspeed")]
        times += [mean(best_of(each["paper"])), static["auto"]["step_ms"]]
        rows.append([name, NOT_GIVEN, *map(shown, times)])
    heads = ["setting", "paper", "Megatron", "DeepSpeed", "Hydraulis", "auto, static"]
    return "Figure 11: ms per step, simulated", heads, rows


def _strategies_table(made: Mapping[str, Row]) -> tuple[str, list[str], list[list[str]]]:
    rows = []
    for name, each in made.items():
        steps, static = each["paper"], each["static"]
        others = [
            own / other
            for strategy in steps["strategies"]
            if not strategy["alike"]
            for own, other in zip(steps["on_mesh_ms"], strategy["ms"], strict=True)
            if other is not None
        ]
        uneven = [
            "{} to {}".format(*(min(found), max(found)))
            if static[way] and (found := static[way]["uneven"])
            else ""
            for way in UNEVEN
        ]
        picked = ", ".join(f"{count} {what}" for what, count in chosen(steps).most_common())
        most = f"{max(others):.2f}" if others else "none"
        rows.append([name, str(len(steps["strategies"])), picked, most, *uneven])
    heads = [
        "setting", "strategies", "steps take",
        f"most that a mixture gains in a step (paper: {OTHER_THAN_FIRST} in most)",
        *(f"{WAYS[way]}: first before last (paper: {{}} to {{}})".format(*UNEVEN[way])
          for way in UNEVEN),
    ]  # fmt: skip
    return "Figure 12, simulated, in the paper's space", heads, rows


def _ablation_table(made: Mapping[str, Row]) -> tuple[str, list[str], list[list[str]]]:
    rows = [
        [
            name,
            *("none" if each is None else f"{each:.2f}" for each in ablation(of["paper"]).values()),
        ]
        for name, of in made.items()
    ]
    heads = ["setting", "(a) packed full", "(b) Equation 1", "(c) heterogeneous", "(d) dynamic"]
    return f"Figure 13: throughput over (a); of the paper {NOT_GIVEN}", heads, rows


def markdown(result: Row) -> str:
    """The tables as a page."""
    there = whole(result["settings"])
    missing = [name for name in result["asked"] if name not in there]
    lines = [
        "# Hydraulis' figures, simulated beside the paper",
        "",
        "Made by `python -m benchmarks.hydraulis_paper`; do not edit. Everything but the paper's"
        f" own figures is *simulated*: {result['provenance']}, where"
        f" the paper measured on A800; {result['steps']} steps of each setting.",
        "",
        "Factors over Megatron multiply from left to right. Strategies are at most what is given:"
        " every step takes the best of all that were simulated. In the paper's space, meshes are"
        " tensor × pipeline parallel with one checkpointing for all micro-batches; `search` is what"
        " ours may be beside that without context parallel.",
    ]
    if missing:
        lines += ["", "Not there yet: " + "; ".join(missing) + "."]
    for title, heads, rows in tables(result):
        if rows:
            lines += ["", f"## {title}", "", *report.markdown_table(heads, rows)]
    return "\n".join(lines) + "\n"


def picture(result: Row, path: Path) -> None:
    """Stacked factors of each setting, the paper's space above ours, on a logarithmic axis."""
    made = whole(result["settings"])
    figure, axes = plt.subplots(figsize=(11, 1.5 + 0.75 * max(len(made), 1)), layout="constrained")
    colours = {part: f"C{number}" for number, part in enumerate((*OUR_PARTS, "packing"))}
    labelled = set()
    for place, each in enumerate(made.values()):
        least = best_baseline(each["static"])[1]
        for offset, factors in ((-0.2, papers_factors(each)), (0.2, our_factors(each))):
            left = 1.0
            for part, factor in factors.items():
                label = None if part in labelled else part
                labelled.add(part)
                axes.barh(place + offset, left * factor - left, 0.36, left, color=colours[part],
                    label=label)  # fmt: skip
                left *= factor
            over = f"{left:.2f}; {left / least:.2f} over the best baseline"
            axes.text(max(left, least) * 1.01, place + offset, over, va="center", fontsize=8)
        label = None if place else "best baseline"
        axes.plot([least] * 2, [place - 0.42, place + 0.42], "k", label=label)
    axes.set_xscale("log")
    axes.set_xlim(right=1.5 * axes.get_xlim()[1])
    ticks = (1, 1.25, 1.5, 2, 2.5, 3, 4)
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(made)), labels=list(made))
    axes.invert_yaxis()
    axes.set_xlabel("times Megatron's throughput, simulated")
    axes.set_title(
        "Upper bars: Hydraulis in the paper's space; lower bars: this package. The paper measured"
        " {} to {} over the best baseline".format(*GAINS),
        fontsize=9,
    )
    figure.legend(fontsize=8, loc="outside lower center", ncols=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    report.write_page("hydraulis_paper", __doc__, markdown, argv, picture)


if __name__ == "__main__":
    main()
