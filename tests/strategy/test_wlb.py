"""What a Trainer does besides training steps: the same under WLBStrategy as in one process."""

import csv
import gc
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger

from lightning_wlb import LanguageModule, WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import (
    SMALL,
    SMALL_TIED,
    Recorder,
    config,
    data,
    module,
    relative_error,
    trainer,
    whole,
)

CASE, TIED = SMALL, SMALL_TIED
DATA, PIPELINE = (2, 1, 1, 1), (1, 2, 1, 1)
HELD_OUT = {"validation_documents": 5}

Make = Callable[..., L.Trainer]


class Validations(L.Callback):
    """The loss of every validation, the sanity check left out."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer, pl_module) -> None:
        if not trainer.sanity_checking:
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def validation(make: Make, folder: Path) -> dict[str, Any]:
    """Before, during and after fit."""
    watch, recorder = Validations(), Recorder()
    runner = make(callbacks=[watch, recorder], val_check_interval=2, max_steps=5, max_epochs=-1)
    model, documents = module(CASE), data(CASE, **HELD_OUT)
    before = runner.validate(model, documents, verbose=False)[0]["val_loss"]
    runner.fit(model, documents)
    after = runner.validate(model, documents, verbose=False)[0]["val_loss"]
    return recorder.record() | {"validations": watch.losses, "before": before, "after": after}


def no_validation(make: Make, folder: Path) -> dict[str, Any]:
    recorder = Recorder()
    runner = make(
        callbacks=[recorder],
        max_steps=5,
        max_epochs=-1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    runner.fit(module(CASE), data(CASE, **HELD_OUT))
    return recorder.record()


def logging(make: Make, folder: Path) -> dict[str, Any]:
    """A logger, a LearningRateMonitor and schedules by tokens."""
    model = module(CASE, warmup_tokens=100, decay_tokens=300)
    runner = make(
        logger=CSVLogger(folder, name="", version="log"),
        callbacks=[LearningRateMonitor()],
        log_every_n_steps=1,
        val_check_interval=2,
        max_steps=4,
    )
    runner.fit(model, data(CASE, **HELD_OUT))
    rows: list[dict[str, str]] = []
    if runner.is_global_zero:
        with (folder / "log" / "metrics.csv").open() as file:
            rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    logged = {name: float(value) for name, value in runner.logged_metrics.items()}
    return {"rows": rows, "logged": logged}


def clipping(make: Make, folder: Path) -> dict[str, Any]:
    """By value, and by a norm that is small and counts a tied weight once."""
    results: dict[str, Any] = {}
    for algorithm, bound in (("value", 1e-3), ("norm", 0.05)):
        recorder = Recorder()
        runner = make(
            callbacks=[recorder], gradient_clip_algorithm=algorithm, gradient_clip_val=bound
        )
        runner.fit(module(TIED), data(TIED))
        results[algorithm] = recorder.record()
        largest = max(float(np.abs(g).max()) for g in recorder.gradients[0].values())
        assert largest > (bound if algorithm == "value" else 0), "else the bound does nothing"
    return results


def nominal(make: Make, folder: Path) -> dict[str, Any]:
    recorder = Recorder()
    model = module(CASE, loss_normalisation="nominal")
    make(callbacks=[recorder]).fit(model, data(CASE))
    return recorder.record()


def fit_again(make: Make, folder: Path) -> dict[str, Any]:
    """The same Trainer, then another, with the same module and data."""
    recorder = Recorder()
    runner = make(callbacks=[recorder], max_steps=2, max_epochs=-1)
    model, documents = module(CASE), data(CASE, **HELD_OUT)
    runner.fit(model, documents)
    runner.fit_loop.epoch_loop.max_steps = 4
    runner.fit(model, documents)
    other = make(callbacks=[recorder], max_steps=2, max_epochs=-1)
    loss = other.validate(model, documents, verbose=False)[0]["val_loss"]
    other.fit(model, documents)
    # A module of its own is split afresh.
    fresh = Recorder()
    other = make(callbacks=[fresh], max_steps=1)
    other.fit(module(TIED), data(TIED))
    return {"same": recorder.record(), "loss": loss, "fresh": fresh.record()}


def given_weights(make: Make, folder: Path) -> dict[str, Any]:
    """A module that has its weights already keeps them."""
    recorder = Recorder()
    model = module(TIED)
    model.configure_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    make(callbacks=[recorder]).fit(model, data(TIED))
    return recorder.record()


class Averaged(LanguageModule):
    """Logs what Lightning averages over ranks."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("averaged", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return loss


def monitors(make: Make, folder: Path) -> dict[str, Any]:
    """Callbacks that decide on a metric: all ranks alike."""
    keeper = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last="link")
    stopper = EarlyStopping("val_loss", patience=2, check_on_train_epoch_end=False)
    speed = ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch.plan.pieces), length_fn=lambda batch: batch.tokens
    )
    runner = make(
        callbacks=[keeper, stopper, speed],
        logger=CSVLogger(folder / "log"),
        enable_checkpointing=True,
        log_every_n_steps=2,
        val_check_interval=1,
        max_steps=30,
        max_epochs=-1,
    )
    model = Averaged(config(False, layers=2), learning_rate=0.05, seed=7)
    documents = data(CASE, **HELD_OUT)
    runner.fit(model, documents)
    assert runner.global_step < 30, "stopped early"
    averaged = float(runner.callback_metrics["averaged"])
    best = runner.validate(model, documents, ckpt_path="best", verbose=False)[0]["val_loss"]
    kept = sorted(path.name for path in folder.glob("*.ckpt"))
    assert (folder / "last.ckpt").is_symlink()
    rest = Recorder()
    again = make(callbacks=[rest], max_steps=runner.global_step + 1, max_epochs=-1)
    again.fit(Averaged(model.config, learning_rate=0.05), documents, ckpt_path=folder / "last.ckpt")
    return {
        "resumed": rest.losses,
        "steps": [float(runner.global_step)],
        "best": best,
        "kept": {name: {} for name in kept},
        "scores": sorted(float(score) for score in keeper.best_k_models.values()),
        "averaged": averaged,
    }


# Where the mesh matters to what a scenario is about it runs on both.
SCENARIOS = (
    (validation, DATA),
    (validation, PIPELINE),
    (no_validation, PIPELINE),
    (logging, PIPELINE),
    (clipping, PIPELINE),
    (nominal, DATA),
    (fit_again, PIPELINE),
    (given_weights, PIPELINE),
    (monitors, PIPELINE),
)


def on_two_ranks(rank: int, folder: Path) -> dict[tuple, dict]:
    results = {}
    for scenario, mesh in SCENARIOS:
        home = folder / f"{mesh}-{scenario.__name__}"
        results[mesh, scenario.__name__] = scenario(
            lambda mesh=mesh, **options: trainer(WLBStrategy(*mesh), 2, **options), home
        )
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("wlb"), process_group=False)


@cache
def expected(scenario: Callable, folder: Path) -> dict[str, Any]:
    return scenario(lambda **options: trainer("auto", 1, **options), folder)


def assert_equal(got: Any, want: Any, where: str) -> None:
    """Equal to ten digits; a tied head on a stage of its own stands for the embedding."""
    if isinstance(want, dict):
        assert set(got) <= set(want) | {"model.head.weight"}, where
        for name, value in got.items():
            name_there = name if name in want else name.replace("head", "embed")
            assert_equal(value, want[name_there], f"{where}/{name}")
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for index, (mine, other) in enumerate(zip(got, want, strict=True)):
            assert_equal(mine, other, f"{where}/{index}")
    elif isinstance(want, np.ndarray):
        assert relative_error(got, want) <= 1e-10, where
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=1e-10), where
    elif where.split("/")[1] == "rows":
        assert float(got) == pytest.approx(float(want), rel=1e-9), where


@pytest.mark.parametrize(("scenario", "mesh"), SCENARIOS)
def test_equals_one_process(results, scenario, mesh, tmp_path_factory):
    want = expected(scenario, tmp_path_factory.getbasetemp() / f"one-{scenario.__name__}")
    for rank, record in enumerate(results):
        got = dict(record[mesh, scenario.__name__])
        if scenario is logging and rank > 0:
            assert got.pop("rows") == [], "rank 0 alone writes the log"
        assert_equal(got, want, scenario.__name__)


def test_validation_does_not_disturb_training(results):
    for rank in results:
        with_it, without = (rank[PIPELINE, name] for name in ("validation", "no_validation"))
        assert with_it["losses"] == without["losses"]
        assert len(with_it["validations"]) == 4
        assert with_it["after"] != with_it["before"]
        for name, value in without["parameters"].items():
            assert np.array_equal(value, with_it["parameters"][name]), name


def by_name() -> tuple[int, str]:
    runner = trainer("wlb", 1)
    model = module(CASE)
    runner.fit(model, data(CASE))
    assert model.executor is None, "the strategy lets go of the module"
    assert all(torch.isfinite(torch.from_numpy(whole(p))).all() for p in model.parameters())
    return runner.global_step, str(runner.strategy.mesh)


def what_outlives_its_trainer() -> list[bool]:
    model = module(CASE)
    runner = trainer(WLBStrategy(), 1, max_steps=1)
    runner.fit(model, data(CASE))
    watched = [weakref.ref(each) for each in (model, model.model, runner.strategy)]
    del model, runner
    gc.collect()
    return [each() is not None for each in watched]


def on_one_rank(rank: int) -> tuple:
    return what_outlives_its_trainer(), by_name()


def test_by_name_and_a_model_and_its_strategy_are_freed_with_their_trainer():
    ((outlives, named),) = run_ranks(on_one_rank, 1, process_group=False)
    assert outlives == [False] * 3
    assert named == (3, "data 1 × pipeline 1 × context 1 × tensor 1")
