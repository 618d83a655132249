"""A step that is not finite: every rank raises, or no rank's parameters move."""

import math
import warnings
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_wlb import InMemoryDocuments, Transformer, WLBDataModule, WLBStrategy
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.training.clipping_and_nonfinite import MOST_SKIPPED, StepGuard
from tests.ranks import run_ranks
from tests.strategy.harness import LENGTHS, VOCABULARY, WINDOW, Recorder, config, trainer, whole

POISON = VOCABULARY - 1
POISONED = 9  # the document that holds it, which is trained on in step 1, on one of two replicas


def documents() -> WLBDataModule:
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, POISON, length) for length in LENGTHS]
    sequences[POISONED][5] = POISON
    return WLBDataModule(
        InMemoryDocuments(sequences, vocab_size=VOCABULARY),
        context_window=WINDOW,
        micro_batches=3,
        packing="original",
        shuffle=False,
        num_workers=0,
    )


class Poisoned(Transformer):
    """Whose loss is NaN, and its gradients, where a label is the poison."""

    def forward(self, micro_batch, *args, **kwargs):
        result = super().forward(micro_batch, *args, **kwargs)
        labels = micro_batch.labels
        return result * math.nan if labels is not None and POISON in labels else result


class Module(LanguageModule):
    def build_model(self):
        return Poisoned(self.config)


class Watch(Recorder):
    """Parameters and optimizer state after every step; and infinite gradients on rank 1.

    Saves after the second step, where it is told where.
    """

    def __init__(self, infinite: tuple[int, ...] = (), save: Path | None = None) -> None:
        super().__init__()
        self.states: list[dict[str, np.ndarray]] = []
        self.infinite = infinite
        self.save = save

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step in self.infinite and trainer.global_rank == 1:
            norm = pl_module.model.get_parameter("layers.1.attention_norm.weight")
            norm.grad.to_local()[0] = math.inf

    def on_train_batch_end(self, trainer, pl_module, *args) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        (optimizer,) = trainer.optimizers
        state = {name: whole(each) for name, each in pl_module.named_parameters()}
        for number, each in enumerate(optimizer.state.values()):
            state |= {f"{number}.{name}": whole(value) for name, value in each.items()}
        self.states.append(state)
        if self.save is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.save)


def fit(strategy: WLBStrategy, watch: Watch, ckpt_path=None, **options) -> L.Trainer:
    options = {"max_steps": 4, "max_epochs": -1} | options
    runner = trainer(strategy, 2, callbacks=[watch], **options)
    runner.fit(Module(config(False, layers=2), seed=7), documents(), ckpt_path=ckpt_path)
    return runner


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(each, other[name]) for name, each in one.items())


def raises(mesh: tuple[int, ...], infinite: tuple[int, ...] = (), **options) -> str:
    with pytest.raises(RuntimeError, match=r"not finite|is nan") as error:
        fit(WLBStrategy(*mesh), Watch(infinite), **options)
    return str(error.value)


class Loses(L.Callback):
    """A weight of rank 1 becomes NaN before the second step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 1 and trainer.global_rank == 1:
            weight = pl_module.model.get_parameter("layers.1.attention_norm.weight")
            weight.data.to_local()[0] = math.nan


def loses(folder: Path) -> str:
    """A run whose weights are not finite is not saved, and not gone on with."""
    keeper = ModelCheckpoint(folder, save_top_k=0, save_on_exception=True)
    options = {"callbacks": [Loses(), keeper], "enable_checkpointing": True, "max_epochs": -1}
    runner = trainer(WLBStrategy(2, on_nonfinite="skip"), 2, max_steps=4, **options)
    with pytest.raises(RuntimeError, match="weights themselves") as error:
        runner.fit(Module(config(False, layers=2), seed=7), documents())
    assert not list(folder.glob("*"))
    return str(error.value)


def on_two_ranks(rank: int, folder: Path) -> dict[str, str]:
    results = {
        "loss": raises((1, 2), gradient_clip_val=None),
        # Of one rank's shard, in step 0; by value an infinite one would become finite.
        "norm": raises((2,), (0,), gradient_clip_algorithm="norm"),
        "value": raises((2,), (0,), gradient_clip_algorithm="value"),
        "weights": loses(folder / "lost"),
    }
    path = folder / "skipped.ckpt"
    strategy, watch = WLBStrategy(2, on_nonfinite="skip"), Watch((2,), path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner = fit(strategy, watch)
    said = [str(each.message) for each in caught if "skipped" in str(each.message)]
    assert len(said) == (2 if rank == 0 else 0), said
    assert runner.global_step == 4
    assert strategy.guard.skipped == 2
    states = watch.states
    assert [same(states[n], states[n + 1]) for n in range(3)] == [True, True, False]
    assert np.isnan(watch.losses).tolist() == [False, True, False, False]
    # Gone on with from the skipped step.
    again = Watch((2,))
    fit(WLBStrategy(2, on_nonfinite="skip"), again, ckpt_path=path)
    assert again.plans == watch.plans[2:]
    assert again.losses == watch.losses[2:]
    assert same(again.states[-1], watch.states[-1])
    ignoring = Watch()
    fit(WLBStrategy(2, on_nonfinite="ignore"), ignoring, max_steps=2)
    assert not np.isfinite(ignoring.parameters["model.head.weight"]).any()
    return results


def test_every_rank_raises_or_skips(tmp_path):
    first, second = run_ranks(on_two_ranks, 2, tmp_path, timeout=60, process_group=False)
    assert first == second, "every rank says the same"
    said = first["loss"]
    # The loss of a pipeline is computed on its last rank.
    assert said.startswith("Step 1: the loss is nan on rank 1, and gradients are not finite of")
    assert " of embed.weight, layers.0.attention_norm.weight, " in said
    assert f", document {POISONED} of InMemoryDocuments" in said
    assert "on_nonfinite='skip'" in said
    lost = (
        "The weights themselves are not finite: layers.1.attention_norm.weight. Nothing is saved."
    )
    assert lost in first["weights"]
    for case in ("norm", "value"):
        assert first[case].startswith(
            "Step 0: gradients are not finite of layers.1.attention_norm.weight."
            " Documents of the step: document 0 of InMemoryDocuments, "
        )


@pytest.mark.filterwarnings("ignore:.*The step is skipped")
def test_a_run_that_does_not_recover_is_ended(monkeypatch):
    guard = StepGuard("skip")
    guard.attach(torch.nn.Linear(2, 2), Mesh(), torch.device("cpu"), [], str)
    monkeypatch.setattr(guard, "_report", lambda ranks: f"{ranks}.")
    monkeypatch.setattr(guard, "_anywhere", lambda tensors: [])
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)

    def step(loss: float) -> bool:
        guard.ran(None, [0.0, loss])
        return guard.accepts([])

    assert [step(math.nan) for _ in range(MOST_SKIPPED - 1)] == [False] * 9
    assert step(1.0)
    assert [step(math.inf) for _ in range(MOST_SKIPPED - 1)] == [False] * 9
    with pytest.raises(RuntimeError, match=r"^\[1\]. This is so in 10 steps in a row"):
        step(math.inf)
    assert guard.skipped == 19


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"on_nonfinite='warn'.*raise.*skip.*ignore"):
        WLBStrategy(on_nonfinite="warn")
