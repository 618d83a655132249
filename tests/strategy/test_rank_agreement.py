"""What ranks were given otherwise ends the run on all of them before its first step, by name."""

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_wlb.strategy import rank_agreement
from lightning_wlb.strategy.rank_agreement import _text, compare_ranks, digest_of
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, SMALL_TIED, data, module, trainer


class Change(L.Callback):
    """Changes something when training begins."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        if self.what == "lr":
            optimizer.param_groups[0]["lr"] = 0.5
            next(pl_module.parameters()).requires_grad = False
        elif self.what == "optimizer":
            trainer.strategy.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=1e-2)]
        elif self.what == "values":
            for name, each in pl_module.named_parameters():
                if "norm" in name or "head" in name:
                    with torch.no_grad():
                        each.to_local().view(-1)[:1] += 1


class Plateau(L.Callback):
    """Halves the learning rate after the second step, as a schedule on a metric of one rank may."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.optimizers[0].param_groups[-1]["lr"] /= 2


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    # What rank 1 is given in place of what all are, of the Trainer and of the module, and what is
    # said of it.
    "numbers": (
        {
            "max_steps": 4,
            "gradient_clip_val": None,
            "precision": "32-true",
            "val_check_interval": 2,
        },
        {"seed": 8, "learning_rate": 0.5},
        [
            "max_steps: 3 on rank 0; 4 on rank 1.",
            "gradient_clip_val: 0.5 on rank 0; None on rank 1.",
            "precision: 64-true on rank 0; 32-true on rank 1.",
            "val_check_interval: 1.0 on rank 0; 2 on rank 1.",
            "learning_rate: 0.01 on rank 0; 0.5 on rank 1.",
            "And 2 more.",  # the seed and the reduce_dtype
        ],
    ),
    "others": (
        {
            "callbacks": [ModelCheckpoint(every_n_train_steps=3), EarlyStopping("train_loss")],
            "enable_checkpointing": True,
        },
        {"warmup_tokens": 9, "seed": 8},
        [
            "version of torch: ",
            "; 2.0 on rank 1.",
            "'every_n_train_steps': 3",
            "EarlyStopping{'monitor': 'train_loss'",
            "warmup_tokens: 0 on rank 0; 9 on rank 1.",
            "seed of initial values: 7 on rank 0; 8 on rank 1.",
        ],
    ),
    "lr": (
        {"callbacks": [Change("lr")]},
        {},
        [
            "lr of the groups of optimizer 0: [0.01, 0.01] on rank 0; [0.5, 0.01] on rank 1.",
            "same. parameters: [[embed.weight, [64, 32], True], ",
            "on rank 0; [[embed.weight, [64, 32], False], ",
        ],
    ),
    "optimizer": (
        {"callbacks": [Change("optimizer")]},
        {},
        ["optimizer 0: AdamW on rank 0; SGD on rank 1."],
    ),
    "values": ({"callbacks": [Change("values")]}, {}, []),
    "plateau": (
        {"callbacks": [Plateau()]},
        {},
        [
            "lr of the groups of optimizer 0: [0.01, 0.01] on rank 0; [0.01, 0.005] on rank 1.",
            "sync_dist=True",
        ],
    ),
}
MESHES: dict[tuple[int, ...], list[str]] = {
    (2, 1, 1, 1): ["numbers", "others", "lr", "plateau"],
    (1, 2, 1, 1): ["optimizer", "values"],
    (1, 1, 1, 2): ["values"],
}


def refused(rank: int, meshes: dict[tuple[int, ...], list[str]]) -> dict[str, str]:
    """How a run ends of which rank 1 is given something else."""
    found = {}
    for mesh, names in meshes.items():
        size = math.prod(mesh)
        for name in names:
            other = rank == 1
            given, own, _ = CASES[name] if other else ({}, {}, [])
            if rank == 0:  # a callback of the user's own may be there on one rank only
                given = {"callbacks": [Change("nothing")]}
            older = "2.0" if other and name == "others" else torch.__version__
            case = SMALL_TIED if mesh[1] > 1 else SMALL
            made = module(case)
            for key, value in own.items():
                setattr(made, key, value)
                made.hparams[key] = value
            runner = trainer(WLBStrategy(*mesh), size, **given)
            found[f"{name} on {mesh}"] = "trained to the end"
            try:
                with patch.object(torch, "__version__", older):
                    runner.fit(made, data(case))
            except MisconfigurationException as error:
                found[f"{name} on {mesh}"] = str(error)
    return found


def test_what_differs_is_named_by_rank_with_both_values() -> None:
    one, other = run_ranks(refused, 2, MESHES, process_group=False)
    assert one == other, "all ranks raise the same"
    for name, said in one.items():
        assert said.startswith("The ranks of this run were not given the same. "), name
        for wanted in CASES[name.partition(" on ")[0]][2]:
            assert wanted in said, name
    assert "values that tensor-parallel ranks at (0, 0, 0) share: " in one["values on (1, 1, 1, 2)"]
    assert "values of the tied embed.weight at (0, 0, 0): " in one["values on (1, 2, 1, 1)"]


def test_facts_that_differ_are_listed_with_ranks() -> None:
    facts = [{"a": "1", "b": "2"}] * 9 + [{"a": "3"}] + [{"a": "1", "c": "4"}] * 2
    with (
        patch.object(rank_agreement.Ranks, "every", lambda self, do: facts),
        pytest.raises(MisconfigurationException) as error,
    ):
        compare_ranks(dict)
    said = "same. a: 1 on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more; 3 on rank 9. Run"
    assert said in str(error.value), "what a rank does not have it cannot have otherwise"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"lr": torch.tensor(0.5), "betas": (0.9, 0.95)}, "lr=0.5, betas=[0.9, 0.95]"),
        ("/one/place/weights", "weights"),
        ([object(), None, True], "[object, None, True]"),
    ],
)
def test_a_setting_in_words_is_the_same_on_all_ranks(value, said) -> None:
    assert _text(value) == said
    assert len(_text([value] * 100)) < 200


def test_a_digest_changes_with_whatever_a_schedule_may_set() -> None:
    def digest(**changed: Any) -> int:
        group = {"params": [], "lr": 0.1, "betas": (0.9, 0.95), "foreach": None, **changed}
        return digest_of([SimpleNamespace(param_groups=[group])])

    changes = [{"lr": 0.2}, {"lr": torch.tensor(0.3)}, {"betas": (0.9, 0.96)}, {"weight_decay": 0}]
    assert len({digest(), *(digest(**each) for each in changes)}) == 5
    assert digest() == digest(params=[1]) == digest(lr=torch.tensor(0.1, dtype=torch.float64))
