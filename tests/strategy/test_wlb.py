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
from lightning.pytorch.cli import LightningCLI
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


def another_module(make: Make, folder: Path) -> dict[str, Any]:
    """One Trainer, one module after the other."""
    watch = Validations()
    runner = make(callbacks=[watch])
    runner.validate(module(CASE), data(CASE, **HELD_OUT), verbose=False)
    runner.validate(module(TIED), data(CASE, **HELD_OUT), verbose=False)
    return {"validations": watch.losses}


class Averaged(LanguageModule):
    """Logs what Lightning averages over ranks."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("averaged", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return loss


def monitors(make: Make, folder: Path) -> dict[str, Any]:
    """Callbacks that decide on a metric: all ranks alike."""
    keeper = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)
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
    return {
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
    (no_validation, DATA),
    (no_validation, PIPELINE),
    (logging, PIPELINE),
    (clipping, DATA),
    (clipping, PIPELINE),
    (nominal, DATA),
    (fit_again, PIPELINE),
    (given_weights, PIPELINE),
    (another_module, DATA),
    (monitors, DATA),
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


@pytest.mark.parametrize("mesh", [DATA, PIPELINE], ids=["data", "pipeline"])
def test_validation_does_not_disturb_training(results, mesh):
    for rank in results:
        with_it, without = rank[mesh, "validation"], rank[mesh, "no_validation"]
        assert with_it["losses"] == without["losses"]
        assert len(with_it["validations"]) == 4
        assert with_it["after"] != with_it["before"]
        for name, value in without["parameters"].items():
            assert np.array_equal(value, with_it["parameters"][name]), name


CONFIG = """
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  precision: 64-true
  strategy:
    class_path: lightning_wlb.WLBStrategy
    init_args:
      data_parallel_size: 1
      tensor_parallel_size: auto
model:
  class_path: lightning_wlb.LanguageModule
  init_args:
    config: {dim: 32, layers: 2, heads: 4, kv_heads: 2, ffn_dim: 48, vocab_size: 8}
    learning_rate: 0.01
data:
  class_path: lightning_wlb.WLBDataModule
  init_args:
    documents: [[1, 2, 3, 4, 5, 6, 7], [3, 4], [1, 1, 2, 3, 5], [2, 7, 1]]
    context_window: 8
    num_workers: 0  # the ranks are daemons
    micro_batches: 2
"""


def command_line(rank: int, folder: Path) -> tuple[int, str, float, float]:
    file = folder / "config.yaml"
    file.write_text(CONFIG)

    def run(*options: str) -> L.Trainer:
        cli = LightningCLI(
            args=["fit", "--config", str(file), *options],
            save_config_callback=None,
            subclass_mode_model=True,
            subclass_mode_data=True,
        )
        assert isinstance(cli.model, LanguageModule)
        return cli.trainer

    runner, without = run(), run("--trainer.strategy=auto")
    assert isinstance(runner.strategy, WLBStrategy)
    losses = (float(each.callback_metrics["train_loss"]) for each in (runner, without))
    return runner.global_step, str(runner.strategy.mesh), *losses


def by_name(rank: int) -> tuple[int, str]:
    runner = trainer("wlb", 1)
    model = module(CASE)
    runner.fit(model, data(CASE))
    assert model.executor is None, "the strategy lets go of the module"
    assert all(torch.isfinite(torch.from_numpy(whole(p))).all() for p in model.parameters())
    return runner.global_step, str(runner.strategy.mesh)


def what_outlives_its_trainer(rank: int) -> list[bool]:
    model = module(CASE)
    runner = trainer(WLBStrategy(), 1, max_steps=1)
    runner.fit(model, data(CASE))
    watched = [weakref.ref(each) for each in (model, model.model, runner.strategy)]
    del model, runner
    gc.collect()
    return [each() is not None for each in watched]


def on_one_rank(rank: int, folder: Path) -> tuple:
    return what_outlives_its_trainer(rank), by_name(rank), command_line(rank, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple:
    return run_ranks(on_one_rank, 1, tmp_path_factory.mktemp("one"), process_group=False)[0]


def test_by_name_and_by_configuration_file(alone):
    _, named, configured = alone
    mesh = "data 1 × pipeline 1 × context 1 × tensor 1"
    assert named == (3, mesh)
    assert configured[:2] == (2, mesh)
    assert configured[2] == pytest.approx(configured[3], rel=1e-12)


def test_a_model_and_its_strategy_are_freed_with_their_trainer(alone):
    assert alone[0] == [False] * 3
