"""A run that breaks off and is resumed counts as one that nothing broke."""

import shutil
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.tuner import Tuner
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, config, data, module, trainer


class Broken(Exception):
    """What ends an attempt."""


class Breaks(L.Callback):
    """Ends the run once so many steps have been taken, where it says; notes what ran."""

    def __init__(self, steps: int | None, where: str) -> None:
        self.steps = steps
        self.ran: dict[int, tuple[Any, ...]] = {}
        self.validated: list[int] = []
        if where.startswith("on_"):
            setattr(self, where, self._break)
        self.stops = where

    def _break(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.steps:
            raise Broken

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        loss = float(outputs["loss"]).hex()
        logged = trainer.fit_loop.epoch_loop._batches_that_stepped  # as loggers count
        self.ran[trainer.global_step] = trainer.current_epoch, batch_idx, loss, rate, logged
        stops = self.stops in ("stop", "stop, no validation due")
        trainer.should_stop |= stops and trainer.global_step == self.steps

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        begins = self.stops == "stop as an epoch begins"
        trainer.should_stop |= begins and trainer.global_step == self.steps

    def on_validation_end(self, trainer, pl_module) -> None:
        due = self.stops != "stop, no validation due" or trainer.global_step != self.steps
        self.validated += [trainer.global_step] * due


@dataclass(frozen=True)
class Case:
    """Options of the keeper and of the Trainer; after which steps it breaks, and where, in turn.

    With ``max_tokens`` nothing breaks: so many tokens end every attempt but the last.
    """

    keeper: dict[str, Any]
    options: dict[str, Any]
    breaks: tuple[int, ...]
    where: tuple[str, ...] = ("on_train_batch_start",)
    max_tokens: int | None = None
    searches: bool = False  # every attempt begins with a search for a learning rate


# The documents last three steps.
CASES = {
    "saved after every step": Case({"every_n_train_steps": 1}, {}, (2, 3)),
    "documents end before limit_train_batches do": Case(
        {"every_n_train_steps": 1}, {"limit_train_batches": 2}, (1, 3)
    ),
    "saved after epochs, max_steps": Case(
        {"save_on_train_epoch_end": True}, {"max_steps": 9}, (3,)
    ),
    "saved on exceptions in backward": Case(
        {"every_n_train_steps": 99, "save_on_exception": True},
        {"val_check_interval": 3, "check_val_every_n_epoch": None},
        (1, 2, 4),
        ("on_after_backward",),
    ),
    "twice around the begin of an epoch that the documents' end makes short": Case(
        {"every_n_train_steps": 3, "save_on_exception": True},
        {"limit_train_batches": 2},
        (2, 3),
        ("on_train_epoch_start", "on_train_epoch_end"),
    ),
    "stopped where a validation was due, saved at the epoch's end": Case(
        {"save_on_train_epoch_end": True},
        {"val_check_interval": 2, "check_val_every_n_epoch": None},
        (2,),
        ("stop",),
    ),
    "stopped in an epoch's last step, saved by the validation that this brings": Case(
        {"save_on_train_epoch_end": False},
        {"val_check_interval": 4, "limit_train_batches": 4},
        (3, 6),
        ("stop, no validation due",),
    ),
    "stopped as an epoch begins": Case(
        {"every_n_train_steps": 99, "save_last": True},
        {"val_check_interval": 2, "check_val_every_n_epoch": None},
        (0, 3),
        ("stop as an epoch begins",),
    ),
    "over, run again, and then for more epochs": Case(
        {"every_n_train_steps": 1, "save_last": True},
        {"limit_train_batches": 2},
        (-1, -1, -1, -1),
        ("1 epoch", "1 epoch", "2 epochs", "2 epochs", "to the end"),
    ),
    "a search for a learning rate reads before the position is restored": Case(
        {"every_n_train_steps": 1}, {"limit_val_batches": 0}, (2,), searches=True
    ),
    "max_tokens inside an epoch": Case(
        {"every_n_train_steps": 1}, {"limit_val_batches": 0}, (-1,), max_tokens=300
    ),
    "max_tokens inside an epoch, saved at its end": Case(
        {"save_on_train_epoch_end": True}, {"limit_val_batches": 0}, (-1,), max_tokens=300
    ),
    "max_tokens at an epoch's end": Case(
        {"every_n_train_steps": 1}, {"limit_val_batches": 0}, (-1,), max_tokens=390
    ),
}


class HalvesByEpoch(LanguageModule):
    """Halves its learning rate with every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


Done = tuple[dict[int, Any], list[int]]
"""What ran, and where validations ended."""


def attempts(folder: Path, case: Case, breaks: tuple[int, ...]) -> Done:
    """What runs that broke off, and the last one, did together; an unbroken one saves nothing."""
    ran: dict[int, Any] = {}
    validated: list[int] = []
    for steps, where in zip((*breaks, None), cycle(case.where)):
        watch = Breaks(steps, where)
        keeper = [ModelCheckpoint(folder, "{step}", save_top_k=-1, **case.keeper)]
        given = {"max_steps": -1, "max_epochs": 3, "num_sanity_val_steps": 0, **case.options}
        if "epoch" in where and where[0].isdigit():
            given["max_epochs"] = int(where[0])
        search = [LearningRateFinder(num_training_steps=5)] if case.searches else []
        run = trainer(
            WLBStrategy(),
            1,
            callbacks=[watch, *(keeper if breaks else []), *search],
            enable_checkpointing=bool(breaks),
            default_root_dir=folder,
            **given,
        )
        bound = None if steps is None else case.max_tokens
        documents = data(SMALL, micro_batches=8, validation_documents=2, max_tokens=bound)
        learner = module(SMALL, warmup_tokens=400, decay_tokens=2000)
        if case.max_tokens:
            learner = HalvesByEpoch(config(tied=False, layers=2), seed=7)
        try:
            run.fit(learner, documents, ckpt_path="last" if ran else None)
        except Broken:
            assert steps is not None
        ran |= watch.ran
        validated += watch.validated
    return ran, validated


def everything(rank: int, home: Path) -> dict[str, tuple[Done, Done]]:
    """Of each case the unbroken run, which some have in common, and the broken ones."""
    unbroken: dict[str, Done] = {}
    results = {}
    for number, (name, case) in enumerate(CASES.items()):
        kind = str((case.options, case.max_tokens is None, case.searches))
        if kind not in unbroken:
            unbroken[kind] = attempts(home / "unbroken", case, ())
        results[name] = unbroken[kind], attempts(home / str(number), case, case.breaks)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, tuple[Done, Done]]:
    home = tmp_path_factory.mktemp("broken")
    return run_ranks(everything, 1, home, process_group=False, timeout=240)[0]


@pytest.mark.parametrize("name", CASES)
def test_steps_epochs_rates_and_validations_are_those_of_an_unbroken_run(name, results):
    unbroken, broken = results[name]
    assert {epoch for epoch, *_ in unbroken[0].values()} == {0, 1, 2}
    assert broken == unbroken


class SavesEarly(L.Callback):
    """Saves before a fit has restored anything, as what it began with."""

    def on_fit_start(self, trainer, pl_module):
        trainer.save_checkpoint(Path(trainer.default_root_dir, "early.ckpt"))


def saved_early(rank: int, home: Path) -> tuple[list[str], list[str]]:
    """What a run that goes on says of an early save, and what a search and an evaluation leave."""
    early = SavesEarly()
    options = {"default_root_dir": home, "enable_checkpointing": True, "max_steps": 2}

    def run(*callbacks: L.Callback) -> L.Trainer:
        keeper = OnExceptionCheckpoint(home)
        return trainer(WLBStrategy(), 1, callbacks=[keeper, *callbacks], **options)

    first = run(early)
    first.fit(module(SMALL), data(SMALL))
    first.save_checkpoint(home / "on_exception.ckpt")
    shutil.rmtree(home / "early.ckpt")
    said = []
    search = LearningRateFinder(num_training_steps=5, update_attr=False)
    for path, callbacks in (("last", [early]), ("last", [search, early]), (None, [early])):
        options["max_steps"] += 2
        try:
            run(*callbacks).fit(module(SMALL), data(SMALL), ckpt_path=path)
        except MisconfigurationException as error:
            said.append(str(error))
    Tuner(run()).lr_find(module(SMALL), data(SMALL), num_training=3, update_attr=False)
    run().validate(module(SMALL), data(SMALL, validation_documents=2))
    return said, sorted(each.name for each in home.glob("*.ckpt"))


def test_nothing_is_saved_before_a_run_that_goes_on_is_restored(tmp_path):
    """The next attempt would take it for the newest, and begin anew. Only a fit removes one."""
    ((said, left),) = run_ranks(saved_early, 1, tmp_path)
    assert len(said) == 3
    for each in said:
        assert f"before the run has the state of {tmp_path}/on_exception.ckpt again" in each
    assert left == ["on_exception.ckpt"]


class FailsOnce(L.Callback):
    """Raises in one step, the first time that it comes."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == self.step:
            self.step = None
            raise Broken


def one_trainer(rank: int, home: Path, strategy: str) -> tuple[int, list[str]]:
    """Fits of one Trainer again and again: the steps taken, and what was saved."""
    keeper = ModelCheckpoint(home, "{step}", save_top_k=-1, save_on_exception=True)
    options = {"default_root_dir": home, "enable_checkpointing": True}
    options |= {"callbacks": [keeper, FailsOnce(9)], "max_epochs": 3, "max_steps": -1}
    runner = trainer(strategy, 1, **options)
    learner, documents = module(SMALL), data(SMALL, validation_documents=2)
    Tuner(runner).lr_find(learner, datamodule=documents, num_training=5, update_attr=False)
    with pytest.raises(Broken):
        runner.fit(learner, documents)
    runner.fit(learner, documents, ckpt_path=home / "step=9.ckpt")
    steps = runner.global_step
    runner.validate(learner, documents, ckpt_path=home / "step=10.ckpt", verbose=False)
    runner.fit_loop.max_epochs = 4
    runner.fit(learner, documents)
    return steps, sorted(each.name for each in home.glob("step*.ckpt"))


@pytest.mark.parametrize("strategy", ["wlb", "auto"])
def test_one_trainer_searches_fails_goes_on_evaluates_and_goes_on(tmp_path, strategy):
    """It failed in an epoch's last step; Lightning would take that epoch for over, and the next."""
    ((steps, saved),) = run_ranks(one_trainer, 1, tmp_path, strategy, process_group=False)
    assert steps == 15
    assert saved == [f"step={each}.ckpt" for each in (10, 15, 20, 5, 9)]
