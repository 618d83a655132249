"""What is said of a step that left the mesh and fails."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from lightning_wlb.data.batch import StepBatch
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Scheme, StepPlan
from lightning_wlb.schedule.actions import Action
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.supervision.progress import PROGRESS
from lightning_wlb.training.out_of_memory import note
from tests.heterogeneous.fixed_choices import ON_THREE, PROFILE, take_in_turn
from tests.prediction.test_predictor import plan_of
from tests.ranks import run_ranks
from tests.strategy.harness import Case, Recorder, config, data, trainer


def test_a_step_that_runs_out_of_memory_names_its_pipeline() -> None:
    """Rank 3 is the last of two stages."""
    strategy = (Scheme(0, (4,), context=2), Scheme(2, (2, 2)))
    plan = replace(plan_of([[[900]], [[6000], [2000]]]), schemes=strategy)
    batch, unused = StepBatch(plan, 1, plan.replicas, [], {}, 0, False), SimpleNamespace()
    assert note(Action(1, "F", 1), batch, unused, unused) == (
        "WLBStrategy: out of memory in step 0, which left the mesh, in the pipeline on ranks"
        " [2, 4): context 1 × tensor 1, layers 2+2, action 1F1: micro-batch 1 of 2000 tokens,"
        " 2000 rows on this rank, 2[0:2000). Give WLBStrategy(dynamic=...) without these pipelines,"
        " or 'off'."
    )


class Bad(Transformer):
    """Whose loss is NaN on the last rank in the first step."""

    def forward(self, micro_batch, hidden, *args, **kwargs):
        result = super().forward(micro_batch, hidden, *args, **kwargs)
        batch = PROGRESS.batch
        last = torch.distributed.get_rank() == 2
        return result * math.nan if last and batch and batch.plan.step == 0 else result


class Module(LanguageModule):
    def build_model(self):
        return Bad(self.config)


def run(rank: int) -> dict[str, Any]:
    take_in_turn(ON_THREE[::-1])
    recorder = Recorder()
    strategy = WLBStrategy(3, dynamic=ON_THREE, on_nonfinite="skip")
    runner = trainer(strategy, 3, callbacks=[recorder], precision="32-true", max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.fit(Module(config(False, layers=2), seed=7), data(Case("slim"), profile=PROFILE))
    said = [str(each.message) for each in caught if "skipped" in str(each.message)]
    return {"said": said, "plans": recorder.plans}


def test_a_step_that_is_not_finite_names_its_pipelines_documents() -> None:
    """Rank 2 is alone in a pipeline, which would be the third replica of the mesh."""
    results = run_ranks(run, 3, timeout=120, process_group=False)
    (said,) = results[0]["said"]
    first, second = map(StepPlan.from_json, results[0]["plans"])
    assert (first.schemes, second.schemes) == ON_THREE[::-1]
    assert said.startswith("Step 0: the loss is nan on rank 2, and gradients are not finite of ")
    documents = [part.document for part in first.replicas[1].slices]
    named = re.findall(r"document (\d+) of", said.partition("Documents of these ranks: ")[2])
    assert list(map(int, named)) == list(dict.fromkeys(documents))[:4]
