"""Hydraulis' Figures 10 to 13, simulated beside what the paper says.

Hydraulis ("Demystifying Workload Imbalances in Large Transformer Model Training over
Variable-length Sequences") reports 1.32 to 2.66 times the throughput of the best of Megatron-LM,
DeepSpeed and HotSPa. Here the question is where such a factor comes from: from packing, from what
the static search may choose (context parallel, recomputation), or from strategies that differ
between pipelines and steps (:mod:`benchmarks.hydraulis_runs`).

Models, clusters, windows and tokens of a step are the paper's as far as its text gives them;
:data:`SETTINGS` was written down before the first run. Of F1 to F3 in its Figure 10 the text says
that the longest documents have 16K, 32K and 32K tokens; here F1 and F2 have the default of 100K
tokens in a step, and 200K are in Figure 11. Lengths are those of
:data:`benchmarks.slimpack_paper.CORPORA`. The paper ran on A800 GPUs, for which there is no
profile: figures are of another device, which the result names.

Not simulated: HotSPa, which trains each step on several meshes in turn; tensor parallel across
nodes, which no mesh of ours has (the paper's Megatron takes 16 ranks for a 32B at 32K, here it
may recompute instead); ZeRO-3, without which DeepSpeed does not hold a 32B.

Parts are written one by one, and what is in the file is not run again, unless ``--anew`` says so.

Run ``python -m benchmarks.hydraulis_paper --help``. Prints tables and, last, one JSON object.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks import report
from benchmarks.hydraulis_runs import our_steps, paper_steps, static, with_auto
from benchmarks.hydraulis_tables import markdown, picture, show
from benchmarks.meshes import COMMON_CRAWL, GITHUB, Setting
from benchmarks.slimpack_paper import K
from lightning_wlb.cost.profile import Profile

SETTINGS = {
    "7B on 16, 32K CommonCrawl": Setting("7B", 16, 32 * K, 100_000, COMMON_CRAWL),
    "7B on 16, 32K GitHub": Setting("7B", 16, 32 * K, 100_000, GITHUB),
    "7B on 16, 16K CommonCrawl": Setting("7B", 16, 16 * K, 100_000, COMMON_CRAWL),
    "13B on 32, 32K CommonCrawl": Setting("13B", 32, 32 * K, 100_000, COMMON_CRAWL),
    "13B on 32, 32K GitHub": Setting("13B", 32, 32 * K, 100_000, GITHUB),
    "32B on 64, 32K CommonCrawl": Setting("32B", 64, 32 * K, 100_000, COMMON_CRAWL),
    "32B on 64, 32K GitHub": Setting("32B", 64, 32 * K, 100_000, GITHUB),
    "7B on 16, 32K CommonCrawl, 200K tokens": Setting("7B", 16, 32 * K, 200_000, COMMON_CRAWL),
}
"""The first seven are of Figure 10, the last with the first of Figure 11."""

PARTS = ("auto", "static", "paper", "dynamic")


def run_setting(
    setting: Setting, profile: Profile, steps: int, made: dict[str, Any], save: Callable[[], None]
) -> None:
    """Add the parts that are missing, and save after each."""
    runs: dict[str, Callable[[], Any]] = {
        "auto": lambda: with_auto(setting, profile, steps),
        "static": lambda: static(setting, profile, steps, made["auto"]["auto"]["flops"]),
        "paper": lambda: paper_steps(setting, profile, steps, made["static"]["two_stage"]),
        "dynamic": lambda: our_steps(setting, profile, steps, made["auto"]["auto, one stage"]),
    }
    for part, run in runs.items():
        if part not in made:
            begin = time.process_time()
            made[part] = run()
            made.setdefault("cpu", {})[part] = round(time.process_time() - begin, 1)
            save()


def main(argv: list[str] | None = None) -> None:
    parser = report.settings_parser("hydraulis_paper", __doc__, SETTINGS, 4, "h100-fa2")
    parser.add_argument("--anew", nargs="+", default=[], choices=PARTS, help="parts to run again")
    arguments = parser.parse_args(argv)
    profile, output = Profile.load(arguments.profile), arguments.output
    result, save = report.gone_on_with("hydraulis_paper", profile, arguments)
    result |= {"simulated": True, "asked": list(SETTINGS)}
    result.setdefault("settings", {})
    for name in track(arguments.settings, "Simulating", console=Console(stderr=True)):
        made = result["settings"].setdefault(name, {})
        for part in arguments.anew:
            made.pop(part, None)
        run_setting(SETTINGS[name], profile, arguments.steps, made, save)
    show(result, Console(width=200))
    if output:
        output.with_suffix(".md").write_text(markdown(result))
        picture(result, output.with_suffix(".png"))
    report.finish(result)


if __name__ == "__main__":
    main()
