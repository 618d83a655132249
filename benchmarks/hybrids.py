"""What balancing gains where three of four layers have linear attention, and where all attend.

A decoder of the shape of Qwen3.5's 9B (one layer of four attends, the others are gated delta rules)
and one of the same sizes whose layers all attend. Documents are Generator A's, windows 131,072
tokens, N = 8, on a mesh of data 2, pipeline 4 and context 4. Ways to plan the hybrid's steps:

* ``best_fit``: bins of equal tokens, longest first;
* ``auto``: by the hybrid's own times;
* ``auto by attention``: by the times of the decoder whose layers all attend.

Each is simulated by the hybrid's times on a device profile: a recurrent layer takes its FLOPs in
chunks of 64 tokens at the rate of matrix products, the traffic of its inputs and results, and the
all-to-alls of both.

Run ``python -m benchmarks.hybrids --output FILE.json``. The last line is one JSON object: time per
token of each way over ``auto``'s, by corpus of the model, and the share of attention in the FLOPs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.workloads import documents_for, generator_a
from lightning_wlb.cost.flops import Work, attention_flops, linear_flops
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import LayerShape, ModelShape, Recurrence
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import StepPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.planner import plan_steps
from lightning_wlb.prediction.predictor import Predictor, mean_context_of, model_stages

WINDOW, MICRO_BATCHES, LAYERS, DIM = 131_072, 8, 32, 4096
MESH = Mesh(data=2, pipeline=4, context=4)
ATTENTION = LayerShape(
    heads=16,
    kv_heads=4,
    head_dim=256,
    value_dim=256,
    attention_parameters=DIM * 256 * (2 * 16 + 2 * 4 + 16),  # a gate as wide as the queries
    feed_forward_parameters=3 * DIM * 12_288,
)
CHANNELS = 128 * (2 * 16 + 32)  # queries, keys and values, through a convolution of 4 tokens
DELTA_RULE = LayerShape(
    heads=1,
    kv_heads=1,
    head_dim=1,
    value_dim=1,
    attention_parameters=DIM * (CHANNELS + 128 * (32 + 32)),
    feed_forward_parameters=3 * DIM * 12_288,
    recurrence=Recurrence(
        heads=32,
        flops=32 * 128 * (5 * 64 + 3 * 64 + 6 * 128) + 2 * 4 * CHANNELS,
        moved=3 * CHANNELS + 2 * 32 + 128 * 32,
        state=32 * 128 * 128,
        last_rows=3 * CHANNELS,
    ),
)
SHAPES = {
    "hybrid": ModelShape.of_layers(
        DIM, 248_320, [DELTA_RULE, DELTA_RULE, DELTA_RULE, ATTENTION] * 8
    ),
    "attention": ModelShape.of_layers(DIM, 248_320, [ATTENTION] * LAYERS),
}


def predictor_of(shape: ModelShape, profile: Profile, lengths: np.ndarray) -> Predictor:
    """Predicts steps of a model on the mesh."""
    stages = tuple(model_stages(shape, MESH.stages, mean_context_of(lengths, WINDOW)))
    return Predictor(LatencyModel(profile, shape, MESH), stages)


def plans(packing: str, by: Predictor, lengths: np.ndarray, steps: int) -> list[StepPlan]:
    """Steps planned by the times of ``by``."""
    planner = Planner(
        lengths,
        DataSettings(WINDOW, MICRO_BATCHES, packing=packing, cap=WINDOW, shuffle=False),
        Work.of(by.latency.shape),
        MESH,
        scorer=ProfileScorer(by, "full") if packing == "auto" else None,
        kernel_cost=by.latency.segment_cost,
        activation_checkpointing="full",
    )
    return plan_steps(planner, steps)


def ns_per_token(model: Predictor, steps: list[StepPlan]) -> float:
    """Simulated time of steps over their tokens."""
    return sum(model.predict(plan).total_ns for plan in steps) / sum(plan.tokens for plan in steps)


def compare(profile: Profile, steps: int) -> dict[str, Any]:
    """The ways to plan, on both models."""
    lengths = generator_a(documents_for(steps + 2, MICRO_BATCHES, WINDOW), WINDOW, seed=0)
    models = {name: predictor_of(shape, profile, lengths) for name, shape in SHAPES.items()}
    result: dict[str, Any] = {}
    for name, model in models.items():
        ways = {
            "best_fit": plans("best_fit", model, lengths, steps),
            "auto": plans("auto", model, lengths, steps),
            "auto by attention": plans("auto", models["attention"], lengths, steps),
        }
        took = {way: ns_per_token(model, made) for way, made in ways.items()}
        shape = SHAPES[name]
        pieces = [piece.tokens for plan in ways["best_fit"] for piece in plan.pieces]
        attending = sum(attention_flops(shape, tokens) for tokens in pieces)
        linear = sum(linear_flops(shape, tokens) for tokens in pieces)
        result[name] = {
            "over_auto": {way: round(each / took["auto"], 4) for way, each in took.items()},
            "attention_share": round(attending / (attending + linear), 3),
        }
    return result


def main() -> None:
    parser = report.parser("hybrids", __doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps of each way (default 10)")
    parser.add_argument("--profile", default="h100", help="device profile (default h100)")
    parser.add_argument("--output", type=Path, help="JSON file to write the result to")
    arguments = parser.parse_args()
    profile = Profile.load(arguments.profile)
    result = {
        "benchmark": "hybrids",
        "profile": profile.name,
        "provenance": profile.provenance,
        "steps": arguments.steps,
        **compare(profile, arguments.steps),
    }
    report.finish(result, arguments.output)


if __name__ == "__main__":
    main()
