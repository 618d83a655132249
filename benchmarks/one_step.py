"""One step of four pipeline stages before and after: who waits for whom (docs/images/one_step.png).

Simulated, as ``lightning-wlb plan`` does it: Llama 3 8B on 64 H100s (four stages, each of two
context- and eight tensor-parallel ranks), documents of Generator A, eight windows of 128K tokens.
Every seed gives another order of the documents and so another first step, which ``original``
(concatenated and cut) and ``auto`` both plan. Drawn is the one whose ratio of times is the median
of all seeds', so that no step was chosen for its looks.

    python -m benchmarks.one_step               # a minute; prints one JSON object as its last line
    python -m benchmarks.one_step --seeds 1 --picture FILE
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks import report
from lightning_wlb.callbacks.heat_map import new_figure, save_png
from lightning_wlb.cli.main import parser
from lightning_wlb.cli.pictures import BACKWARD_COLOURS, FORWARD_COLOURS, TimelineRow, rows_of
from lightning_wlb.cli.request import requests_of
from lightning_wlb.mesh_search.evaluate import evaluate
from lightning_wlb.prediction.step import StepPrediction
from lightning_wlb.schedule.actions import FORWARD

WAYS = {
    "original": "Before: documents concatenated and cut every 131,072 tokens",
    "auto": "After: pieces of equal work, the same documents whole",
}
PLAN = (
    "plan --lengths generator-a --model llama3-8b --mesh 1,4,2,8 --context-window 131072"
    " --micro-batches 8 --profile h100 --steps 1 --packing original,auto"
)
FORWARD_COLOUR, BACKWARD_COLOUR, WAITING = FORWARD_COLOURS[1], BACKWARD_COLOURS[0], "#f4d7d7"


def steps_of(seed: int) -> dict[str, StepPrediction]:
    """The simulated first step of each way."""
    arguments = parser().parse_args([*PLAN.split(), "--seed", str(seed)])
    found = {each.data.packing_choice.method: each for each in requests_of(arguments)}
    return {way: evaluate(found[way], found[way].mesh).steps[0] for way in WAYS}


def draw(path: Path, steps: dict[str, StepPrediction]) -> None:
    """Both ways below each other on one time axis."""
    figure = new_figure(10, 5.6)
    panels = figure.subplots(len(steps), 1, sharex=True)
    end = max(step.total_ns for step in steps.values()) / 1e9
    for panel, (way, step) in zip(panels, steps.items(), strict=True):
        panel.set_title(
            f"{WAYS[way]}: {step.total_ns / 1e9:.1f} s, {step.bubble:.0%} of it waiting",
            loc="left",
            fontsize=13,
        )
        rows = rows_of(step.simulations)
        for stage, row in enumerate(rows):
            _draw_row(panel, stage, row, end)
        stages = len(rows)
        panel.set_yticks(range(stages), [f"stage {stage + 1}" for stage in range(stages)])
        panel.tick_params(axis="y", length=0, labelsize=11)
        panel.tick_params(axis="x", labelsize=11)
        panel.set_xlim(0, end)
        panel.set_ylim(stages - 0.5, -0.5)
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel(
        "seconds, simulated with profile h100: Llama 3 8B on 64 H100s, windows of 128K",
        fontsize=11,
    )
    colours = {
        "forward": FORWARD_COLOUR,
        "backward": BACKWARD_COLOUR,
        "waiting, for the stage whose number it has": WAITING,
    }
    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=11, frameon=False)
    save_png(figure, path)


def _draw_row(panel: Axes, stage: int, row: TimelineRow, width: float) -> None:
    for action, begin, end in row.spans:
        colour = FORWARD_COLOUR if action.kind == FORWARD else BACKWARD_COLOUR
        bar = [(begin / 1e9, (end - begin) / 1e9)]
        panel.broken_barh(
            bar, (stage - 0.42, 0.84), facecolor=colour, edgecolor="white", linewidth=0.5
        )
    for begin, end, other in row.waits:
        at, long = begin / 1e9, (end - begin) / 1e9
        panel.broken_barh([(at, long)], (stage - 0.42, 0.84), facecolor=WAITING)
        if other and long > 0.01 * width:  # room for a digit on this panel
            number = int(other.removeprefix("rank ")) + 1
            panel.text(at + long / 2, stage, str(number), fontsize=11, ha="center", va="center")


def main(argv: list[str] | None = None) -> None:
    """Simulate, draw, and print one JSON object."""
    made = report.parser("one_step", __doc__)
    made.add_argument("--seeds", type=int, default=9, help="how many first steps (9)")
    made.add_argument("--picture", type=Path, default=Path("docs/images/one_step.png"))
    given = made.parse_args(argv)
    steps = [steps_of(seed) for seed in range(given.seeds)]
    ratios = [step["original"].total_ns / step["auto"].total_ns for step in steps]
    drawn = sorted(range(len(steps)), key=ratios.__getitem__)[len(steps) // 2]
    draw(given.picture, steps[drawn])
    figures = {
        way: {
            "milliseconds": step.total_ns / 1e6,
            "waiting": step.bubble,
            "tokens": step.plan.tokens,
            "micro_batches": len(step.plan.replicas[0].forward),
        }
        for way, step in steps[drawn].items()
    }
    print(
        json.dumps(
            {"script": "one_step", "plan": PLAN, "ratios": ratios, "drawn": drawn, **figures}
        )
    )


if __name__ == "__main__":
    main()
