"""Options of the Trainer do what they say, or are refused with the remedy."""

from typing import Any

import lightning.pytorch as L
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, ModelPruning
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_wlb.plan import StepPlan
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, Recorder, data, module, trainer

CASE = SMALL


class Casts(MixedPrecision):
    """A precision plugin of the user's own."""

    def __init__(self) -> None:
        super().__init__("bf16-mixed", "cpu")


HELD_OUT = {"validation_documents": 5}

# Options of the Trainer, those of the data module, what follows: steps taken, validations.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "fast_dev_run": ({"fast_dev_run": True}, HELD_OUT, (1, 1)),
    "limit_train_batches": (
        {"limit_train_batches": 2, "max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
        HELD_OUT,
        (4, 2),
    ),
    "max_time": ({"max_time": {"seconds": 0}, "max_epochs": -1}, {}, (0, 0)),
    "max_tokens": ({"max_epochs": -1}, {"max_tokens": 200}, (4, 0)),
    "check_val_every_n_epoch": (
        {
            "check_val_every_n_epoch": None,
            "val_check_interval": 3,
            "inference_mode": False,
            "max_steps": 6,
        },
        HELD_OUT,
        (6, 2),
    ),
    "barebones": ({"barebones": True, "max_steps": 2}, {}, (2, 0)),
    "what changes nothing": (
        {
            "profiler": "simple",
            "detect_anomaly": True,
            "deterministic": True,
            "benchmark": False,
            "sync_batchnorm": True,
            "use_distributed_sampler": False,
            "callbacks": [GradientAccumulationScheduler({0: 1})],
            "max_steps": 2,
        },
        {},
        (2, 0),
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "min_epochs": (
        {"max_epochs": -1, "min_epochs": 2},
        {"max_tokens": 200},
        "max_tokens=200 is reached in epoch 1, but Trainer.min_epochs=2. .* lower min_epochs",
    ),
    "min_steps": (
        {"max_epochs": -1, "min_steps": 9},
        {"max_tokens": 200},
        "max_tokens=200 is reached after 4 steps, .* lower min_steps",
    ),
    "overfit_batches": ({"overfit_batches": 1}, HELD_OUT, "give WLBDataModule a few documents"),
    "limit_train_batches": (
        {"limit_train_batches": 0.5},
        {},
        r"limit_train_batches\)` must be `1.0` or an int",
    ),
    "val_check_interval": (
        {"val_check_interval": 0.8},
        HELD_OUT,
        r"val_check_interval\)` must be .* `1.0` or an int",
    ),
    "limit_val_batches": (
        {"limit_val_batches": 0.1},
        HELD_OUT,
        r"limit_val_batches\)` must be `1.0` or an int",
    ),
    "val_check_interval by the clock": (
        {"val_check_interval": {"seconds": 2}},
        HELD_OUT,
        r"of 2 seconds goes by the clock of each rank.*Give a number of steps",
    ),
    "a plugin that saves": (
        {"plugins": [AsyncCheckpointIO()]},
        {},
        r"would not save by AsyncCheckpointIO.*WLBStrategy\(async_save=True\)",
    ),
    "accumulation": (
        {"callbacks": [GradientAccumulationScheduler({1: 2})]},
        {},
        r"GradientAccumulationScheduler\(\{1: 2, 0: 1\}\) .* WLBDataModule\(micro_batches",
    ),
    "batch size": ({"callbacks": [BatchSizeFinder()]}, {}, "size of a step is that of its doc"),
    "pruning": (
        {"callbacks": [ModelPruning("l1_unstructured")]},
        {},
        "ModelPruning compares weights of one process.*: lightning-wlb export",
    ),
}


class Validations(L.Callback):
    """Counts those that are no sanity check."""

    def __init__(self) -> None:
        self.count = 0

    def on_validation_end(self, trainer, pl_module) -> None:
        self.count += not trainer.sanity_checking


def fit(options: dict[str, Any], settings: dict[str, Any]) -> tuple[L.Trainer, Recorder, int]:
    recorder, validations = Recorder(), Validations()
    callbacks = [recorder, validations, *options.get("callbacks", ())]
    runner = trainer(
        WLBStrategy(1, 2), 2, **({"max_steps": -1} | options | {"callbacks": callbacks})
    )
    runner.fit(module(CASE), data(CASE, num_workers=0, **settings))
    return runner, recorder, validations.count


def runs(rank: int) -> dict[str, tuple[int, int]]:
    results = {}
    for name, (options, settings, _) in RUNS.items():
        runner, recorder, validations = fit(options, settings)
        assert len(recorder.losses) == runner.global_step
        results[name] = (runner.global_step, validations)
        if name == "limit_train_batches":
            # The next epoch of the Trainer goes on in the documents.
            plans = [StepPlan.from_json(text) for text in recorder.plans]
            pieces = [(piece.document, piece.origin) for plan in plans for piece in plan.pieces]
            assert len(set(pieces)) == len(pieces)
    for options, settings, message in REFUSED.values():
        with pytest.raises(MisconfigurationException, match=message) as info:
            fit(options, settings)
        assert "\n" not in str(info.value)
    with pytest.raises(MisconfigurationException, match=r"plugin Casts.*Use Trainer\(precision"):
        trainer(WLBStrategy(1, 2), 2, plugins=[Casts()], precision=None)
    with pytest.raises(MisconfigurationException, match=r"trainer.predict is not there.*export"):
        trainer(WLBStrategy(1, 2), 2).predict(module(CASE), data(CASE))
    return results


def test_options_do_what_they_say_or_are_refused():
    for results in run_ranks(runs, 2, process_group=False):
        assert results == {name: want for name, (_, _, want) in RUNS.items()}
