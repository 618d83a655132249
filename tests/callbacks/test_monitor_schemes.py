"""ImbalanceMonitor where steps leave the mesh: three ranks, two strategies and the mesh in turn."""

import io
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from matplotlib.image import imread
from rich.console import Console

from lightning_wlb.callbacks.monitor import ImbalanceMonitor
from lightning_wlb.callbacks.run_summary import strategies_table
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.schedule.actions import Timing
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.heterogeneous.fixed_choices import ON_THREE, PROFILE, take_in_turn
from tests.ranks import run_ranks
from tests.strategy.harness import Case, data, module, trainer

TURNS = (*ON_THREE, ())
STEPS = 6
CASE = Case("slim", layers=2)


class Known(L.Callback):
    """Keeps what was measured, and replaces it by times that are known."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        executor = trainer.strategy.executor
        measured = type(executor).timings(executor)
        self.steps.append(
            {
                "counts": [len(each.forward) for each in batch.plan.replicas],
                "tokens": batch.plan.tokens,
                "actions": len(measured),
                "attention": [each.attention for each in measured],
            }
        )
        known = []
        for each in measured:
            compute = (1.0 + executor.pipeline.rank.index) * (2 if each.action.kind == "B" else 1)
            known.append(Timing(each.action, 0.0, 99.0, compute, compute / 2))
        executor.timings = lambda: known


class Logged(L.Callback):
    """What the monitor has logged of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, *args) -> None:
        self.steps.append({name: float(each) for name, each in trainer.callback_metrics.items()})


def run(rank: int, folder: Path) -> dict[str, Any]:
    times = take_in_turn(TURNS)
    on_mesh: list[int] = []
    predict = Predictor.predict

    def noted(self: Predictor, plan):
        step = predict(self, plan)
        on_mesh.append(step.total_ns)
        return step

    Predictor.predict = noted  # type: ignore[method-assign]
    known, logged = Known(), Logged()
    monitor = ImbalanceMonitor(folder / "map.png", warm_up_steps=1, profile=PROFILE)
    runner = trainer(
        WLBStrategy(3, dynamic=ON_THREE),
        3,
        callbacks=[known, monitor, logged],
        precision="32-true",
        max_steps=STEPS,
        max_epochs=-1,
        log_every_n_steps=1,
    )
    runner.fit(module(CASE), data(CASE, profile=PROFILE))
    return {
        "known": known.steps,
        "logged": logged.steps,
        "summary": monitor.summary(),
        "strategies": monitor.strategies(),
        "simulated": times,
        "on_mesh": on_mesh,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("monitor")
    return run_ranks(run, 3, folder, timeout=150, process_group=False), folder


def test_every_action_and_its_attention_is_timed_on_each_strategy(runs) -> None:
    """Each strategy's stages are a model of their own, with a kernel of its own."""
    for rank, found in enumerate(runs[0]):
        for number, step in enumerate(found["known"]):
            pipeline = 1 if number % 3 < 2 and rank == 2 else 0
            pipeline = rank if number % 3 == 2 else pipeline
            assert step["actions"] == 2 * step["counts"][pipeline]
            assert all(each > 0 for each in step["attention"])
            assert rank > 0 or step["actions"], "the first pipeline never idles"


def test_degrees_are_those_of_the_steps_own_pipelines(runs) -> None:
    """Rank r computes 3(r + 1) seconds of each micro-batch of its stage, half in attention."""
    for found in runs[0]:
        names = {frozenset(each) for each in found["logged"]}
        assert len(names) == 1, "the same names, whatever the strategy"
        for number, (step, logged) in enumerate(zip(found["known"], found["logged"], strict=True)):
            assert logged["wlb/strategy"] == (1, 2, 0)[number % 3]
            assert logged["wlb/tokens"] == step["tokens"]
            counts = step["counts"]
            context = 1.0
            if number % 3 == 2:
                works, ranks = [3.0, 6.0, 9.0], [1, 1, 1]
            elif number % 3 == 1:
                works, ranks = [3.0 + 6.0, 9.0], [2, 1]
            else:  # two ranks take as long as the slower one
                works, ranks = [2 * 6.0, 9.0], [2, 1]
                mean = counts[0] * 9 / 2 + counts[1] * 9 / 2
                context = (counts[0] * 12 / 2 + counts[1] * 9 / 2) / mean
            totals = [work * count for work, count in zip(works, counts, strict=True)]
            latest = max(total / size for total, size in zip(totals, ranks, strict=True))
            assert logged["wlb/imbalance_data"] == pytest.approx(latest * 3 / sum(totals))
            each = zip(works, ranks, counts, strict=True)
            heaviest = max(work / size for work, size, count in each if count)
            places = sum(count * size for count, size in zip(counts, ranks, strict=True))
            places += max(3 - sum(counts), 0) * 3 / len(ranks)
            assert logged["wlb/imbalance_pipeline"] == pytest.approx(
                heaviest * places / sum(totals)
            )
            assert logged["wlb/imbalance_context"] == pytest.approx(context)


def test_a_step_is_predicted_as_the_pool_has_simulated_it(runs) -> None:
    for found in runs[0]:
        predicted = [each["wlb/step_seconds_predicted"] for each in found["logged"]]
        elsewhere = [each for number, each in enumerate(predicted) if number % 3 < 2]
        assert elsewhere == pytest.approx([each / 1e9 for each in found["simulated"][:4]])
        assert predicted[2::3] == pytest.approx([each / 1e9 for each in found["on_mesh"]])


def test_strategies_have_their_steps_and_times(runs) -> None:
    results, folder = runs
    for found in results:
        assert found["strategies"] == results[0]["strategies"], "the same on every rank"
        assert (found["summary"]["steps"], found["summary"]["timed_steps"]) == (6, 3)
    strategies = results[0]["strategies"]
    logged = results[0]["logged"]
    assert [each["strategy"] for each in strategies] == [0, 1, 2]
    for each, timed in zip(strategies, (5, 3, 4), strict=True):
        assert (each["steps"], each["timed_steps"]) == (2, 1)
        # Of each the first step is its warm-up.
        assert each["seconds_per_step"] == pytest.approx(logged[timed]["wlb/step_seconds"])
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(strategies_table(strategies))
    rows = [re.split(r"[\s│]{2,}", line.strip(" │")) for line in console.export_text().split("\n")]
    for number, name in enumerate(("mesh", "strategy 1", "strategy 2")):
        times = (
            strategies[number]["seconds_per_step"],
            strategies[number]["seconds_per_step_predicted"],
        )
        assert [name, "2", *(f"{each:.3f}" for each in times)] in [row[:4] for row in rows]
    assert imread(folder / "map.png")[..., :3].std() > 0.05
