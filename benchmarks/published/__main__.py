"""Predictions of the package's own models beside what others measured, by class and role.

A run that is not comparable (``unlike`` says why) stands in a group of its own. With ``--output``
the figures from before anything was mended stay as the file has them. ``--profiles`` writes the
median errors of comparable facts that no fit used into the shipped profiles, by the device's name:
``lightning-wlb plan`` says them in its verdict.

Run ``python -m benchmarks.published --help``. Prints a table and, last, one JSON object.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks import report
from benchmarks.published import CLASSES, Fact, facts, fits
from lightning_wlb.cost.profile import Profile

HEADINGS = (
    "class, role",
    "points",
    "sources",
    "median error",
    "worst error",
    "predicted/published",
)


def compare(kind: str) -> list[dict[str, Any]]:
    """Predicted and published figure of each fact of a class, and the ratio of their times."""
    predict = import_module(f"benchmarks.published.{kind}").predict
    rows = []
    for fact in facts(kind):
        predicted = predict(fact)
        ratio = predicted / fact.value
        sizes = {name: value for name, value in fact.sizes.items() if value}
        rows.append(
            {
                "class": "memory" if fact.unit in ("GiB", "GB") else kind,
                "source": fact.source.id,
                "role": fact.role,
                **sizes,
                "unit": fact.unit,
                "published": fact.value,
                "predicted": float(f"{predicted:.4g}"),
                "ratio": round(1 / ratio if is_rate(fact) else ratio, 3),
            }
        )
    return rows


def is_rate(fact: Fact) -> bool:
    """Whether a higher figure is a shorter time."""
    return fact.unit.endswith(("/s", "/s/GPU"))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of some comparisons; the error of a ratio is what it is off 1.

    The spread is the standard deviation of the ratios' natural logarithms.
    """
    ratios = [row["ratio"] for row in rows]
    errors = [abs(ratio - 1) for ratio in ratios]
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    return {
        "points": len(rows),
        "sources": len({row["source"] for row in rows}),
        "median_error": round(median(errors), 4),
        "worst_error": round(max(errors), 4),
        "lowest": min(ratios),
        "median": round(median(ratios), 3),
        "highest": max(ratios),
        "spread": round(math.sqrt(sum((log - mean) ** 2 for log in logs) / len(logs)), 4),
    }


def summaries(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """:func:`summary` of each class and role that has facts."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        unlike = ", not comparable" if "unlike" in row else ""
        groups.setdefault(f"{row['class']}, {row['role']}{unlike}", []).append(row)
    return {name: summary(group) for name, group in groups.items()}


WORDS = {
    "attention": "attention kernels",
    "kernels": "other kernels",
    "collectives": "collectives",
    "steps": "whole steps",
    "memory": "memory",
}
"""What a verdict calls the classes."""


def errors(rows: list[dict[str, Any]], profile: str) -> dict[str, float]:
    """Median error of each class on the device of a profile, fits and unlike runs left out."""
    device = profile.split("-")[0]
    used = [row for row in rows if row["role"] != "fit" and "unlike" not in row]
    result = {}
    for kind, words in WORDS.items():
        each = [row for row in used if row["class"] == kind and row["profile"].startswith(device)]
        if each:
            result[words] = summary(each)["median_error"]
    return result


def main(argv: list[str] | None = None) -> None:
    """Compare, print and write."""
    parser = report.parser("published", __doc__)
    parser.add_argument("--classes", nargs="*", default=CLASSES, choices=CLASSES)
    parser.add_argument("--output", type=Path, help="a .json; .md and .png are written beside it")
    parser.add_argument("--profiles", action="store_true", help="write errors into the profiles")
    arguments = parser.parse_args(argv)
    rows = [row for kind in arguments.classes for row in compare(kind)]
    result = {
        "benchmark": "published",
        "kind": "predicted by the shipped profiles, beside what others measured",
        "summary": summaries(rows),
        "rows": rows,
    }
    Console().print(report.table("predicted / published time", HEADINGS, lines(result["summary"])))
    for name in fits.AT_ONCE if arguments.profiles else ():
        for other in (name, name.replace("h100", "h200")):
            fits.write(replace(Profile.load(other), errors=errors(rows, other)))
    if arguments.output:
        picture(rows, arguments.output.with_suffix(".png"))
        path = arguments.output.with_suffix(".json")
        before = json.loads(path.read_text()) if path.exists() else {}
        result["before"] = before.get("before", {})
    report.finish(result, arguments.output, page)


def lines(each: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of the printed table."""
    return [
        (
            name,
            str(one["points"]),
            str(one["sources"]),
            f"{one['median_error']:.1%}",
            f"{one['worst_error']:.1%}",
            f"{one['lowest']:.2f} to {one['highest']:.2f}, median {one['median']:.2f}",
        )
        for name, one in each.items()
    ]


def page(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    headings = ("source", "class, role", "published", "predicted", "ratio of times")
    rows = [
        (
            row["source"],
            f"{row['class']}, {row['role']}",
            f"{row['published']:g} {row['unit']}",
            f"{row['predicted']:g}",
            f"{row['ratio']:.2f}",
        )
        for row in result["rows"]
    ]
    return "\n".join(
        [
            "# Predictions beside published measurements",
            "",
            "Every figure is predicted by a shipped profile; this project measured none of them.",
            "",
            *report.markdown_table(HEADINGS, lines(result["summary"])),
            "",
            "The same facts, predicted by the package before anything was mended:",
            "",
            *report.markdown_table(HEADINGS, lines(result["before"])),
            "",
            *report.markdown_table(headings, rows),
            "",
        ]
    )


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw predicted against published time of each class, on logarithmic axes."""
    kinds = list(dict.fromkeys(row["class"] for row in rows))
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    colours = {"fit": "tab:grey", "judge": "tab:blue", "lot": "tab:orange"}
    for at, kind in enumerate(kinds):
        axes = figure.add_subplot(2, 3, at + 1)
        own = [row for row in rows if row["class"] == kind]
        for role, colour in colours.items():
            points = [row for row in own if row["role"] == role]
            published = [row["published"] for row in points]
            predicted = [row["predicted"] for row in points]
            axes.scatter(published, predicted, s=10, color=colour, label=role)
        every = [row[name] for row in own for name in ("published", "predicted")]
        ends = [min(every) / 1.5, max(every) * 1.5]
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], alpha=0.15)
        axes.set(xscale="log", yscale="log", title=kind, xlabel="published", ylabel="predicted")
        if not at:
            axes.legend(title="in the rows' units")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
