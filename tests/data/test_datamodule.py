import pickle
import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.planning import DataSettings
from tests.strategy import harness

SHAPE = ModelShape(dim=64, layers=1, heads=1, kv_heads=1, head_dim=64, ffn_dim=64, vocab_size=99)


class Recorder(L.LightningModule):
    """Takes a step on anything and remembers which."""

    model_shape = SHAPE

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.steps: list[int] = []
        self.indices: list[int] = []
        self.digests: list[int] = []
        self.tokens: list[int] = []
        self.validated: list[tuple[int, ...]] = []
        self.fail_at: int | None = None

    def training_step(self, batch: StepBatch, batch_idx: int) -> torch.Tensor:
        if batch.plan.step == self.fail_at:
            raise RuntimeError("a step that fails")
        self.steps.append(batch.plan.step)
        self.indices.append(batch_idx)
        self.digests.append(batch.plan.digest)
        self.tokens.append(batch.tokens)
        return self.weight * batch.tokens

    def validation_step(self, batch: StepBatch, batch_idx: int) -> None:
        self.validated.append(tuple(piece.document for piece in batch.plan.pieces))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3, 1, 40), 1, 300).astype(int)
    return [rng.integers(0, 99, length) for length in lengths]


def data(**changes: Any) -> WLBDataModule:
    # Documents wait. No worker: most runs here are shorter than the start of one.
    defaults = {
        "context_window": 64, "micro_batches": 2, "packing": "wlb", "seed": 1, "num_workers": 0,
    }  # fmt: skip
    arguments: dict[str, Any] = {**defaults, **changes}
    return WLBDataModule(arguments.pop("documents", sequences()), **arguments)


def trainer(folder: Path, **changes: Any) -> L.Trainer:
    """A quiet Trainer on the CPU, without an end."""
    endless = {"max_steps": -1, "max_epochs": -1, "default_root_dir": folder, "accelerator": "cpu"}
    usual = {"precision": "32-true", "gradient_clip_val": None}
    return harness.trainer("auto", 1, **(endless | usual | changes))


def fit(folder: Path, module: Recorder, ckpt: Path | None = None, **changes: Any) -> L.Trainer:
    of_data = {name: changes.pop(name) for name in ("num_workers", "max_tokens") if name in changes}
    runner = trainer(folder, **changes)
    runner.fit(module, data(**of_data), ckpt_path=ckpt, weights_only=True)
    return runner


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    module = Recorder()
    fit(tmp_path_factory.mktemp("unbroken"), module, max_steps=40)
    assert module.steps == list(range(40))
    return module


def epoch_length(module: Recorder) -> int:
    return module.indices.index(0, 1)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_resume_equals_an_unbroken_run(tmp_path: Path, unbroken: Recorder, workers: int) -> None:
    """Stop inside an epoch, before its drain, at its last step, after it: the next step is next."""
    epoch = epoch_length(unbroken)
    assert 6 < epoch < 20
    for stop in (6, epoch - 1, epoch, epoch + 1) if workers == 0 else (6,):
        first = Recorder()
        fit(tmp_path, first, max_steps=stop, num_workers=workers).save_checkpoint(
            tmp_path / "stop.ckpt"
        )
        rest = Recorder()
        runner = fit(
            tmp_path, rest, tmp_path / "stop.ckpt", max_steps=stop + epoch + 2, num_workers=workers
        )
        assert first.digests + rest.digests == unbroken.digests[: stop + epoch + 2]
        assert runner.global_step == stop + epoch + 2


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_resume_from_checkpoints_of_the_callback(tmp_path, unbroken, workers):
    """Saved in the middle of the loop, while the loader has read ahead."""
    epoch = epoch_length(unbroken)
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(
        tmp_path,
        Recorder(),
        max_steps=epoch + 2,
        num_workers=workers,
        callbacks=[callback],
        enable_checkpointing=True,
    )
    for stop in (1, 6, epoch, epoch + 1) if workers == 0 else (6,):
        rest = Recorder()
        fit(
            tmp_path, rest, tmp_path / f"step={stop}.ckpt", max_steps=epoch + 4, num_workers=workers
        )
        assert rest.digests == unbroken.digests[stop : epoch + 4]
        if stop < epoch:
            assert rest.indices[: epoch - stop] == list(range(stop, epoch))


def test_resume_is_quiet(tmp_path: Path, unbroken: Recorder) -> None:
    """With and without a limit on the batches of an epoch, which gives the loader a length."""
    for limit in (None, 5):
        fit(tmp_path, Recorder(), max_steps=3, limit_train_batches=limit).save_checkpoint(
            tmp_path / "stop.ckpt"
        )
        rest = Recorder()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Lightning's own: on this torch, and where Slurm is installed.
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
            warnings.filterwarnings("ignore", message="The `srun` command is available")
            fit(tmp_path, rest, tmp_path / "stop.ckpt", max_steps=12, limit_train_batches=limit)
        assert rest.digests == unbroken.digests[3:12]


def test_a_checkpoint_after_a_failed_step_repeats_that_step(tmp_path: Path) -> None:
    module, datamodule = Recorder(), data()
    module.fail_at = 4
    runner = trainer(tmp_path, max_steps=9)
    with pytest.raises(RuntimeError, match="a step that fails"):
        runner.fit(module, datamodule)
    runner.save_checkpoint(tmp_path / "failed.ckpt")
    rest = Recorder()
    fit(tmp_path, rest, tmp_path / "failed.ckpt", max_steps=9)
    assert module.steps + rest.steps == list(range(9))


def test_max_tokens_ends_the_run_and_a_resumed_end_stays_one(tmp_path, unbroken):
    module = Recorder()
    runner = fit(tmp_path, module, max_tokens=1000)
    assert sum(module.tokens[:-1]) < 1000 <= sum(module.tokens)
    assert module.digests == unbroken.digests[: len(module.steps)]
    runner.save_checkpoint(tmp_path / "end.ckpt")
    again = Recorder()
    fit(tmp_path, again, tmp_path / "end.ckpt", max_tokens=1000)
    assert again.steps == []
    longer = Recorder()
    fit(tmp_path, longer, tmp_path / "end.ckpt", max_tokens=2000)
    assert longer.steps[0] == len(module.steps)
    with pytest.raises(MisconfigurationException, match=r"min_steps=500.*lower\s+min_steps"):
        fit(tmp_path, Recorder(), max_tokens=1000, min_steps=500)


def test_a_second_fit_of_a_finished_run_ends_at_once(tmp_path: Path) -> None:
    module, datamodule = Recorder(), data(max_tokens=1000)
    runner = trainer(tmp_path)
    runner.fit(module, datamodule)
    steps = list(module.steps)
    runner.fit(module, datamodule)
    assert module.steps == steps
    trainer(tmp_path, max_steps=3).fit(module, datamodule)
    assert module.steps == [*steps, 0, 1, 2], "a new Trainer starts from the beginning"


def test_an_evaluation_by_another_trainer_leaves_the_position_alone(tmp_path: Path) -> None:
    """Also one that reads a checkpoint; only a new Trainer starts from the beginning."""
    module, datamodule = Recorder(), data(validation_documents=10)
    pickle.dumps(datamodule)
    runner = trainer(tmp_path, max_steps=2)
    runner.fit(module, datamodule)
    other = trainer(tmp_path, max_steps=1)
    other.fit(Recorder(), datamodule)
    other.save_checkpoint(tmp_path / "one.ckpt")
    evaluating = trainer(tmp_path)
    evaluating.validate(Recorder(), datamodule, ckpt_path=tmp_path / "one.ckpt", verbose=False)
    runner.fit_loop.epoch_loop.max_steps = 5
    runner.fit(module, datamodule)
    assert module.steps == [*range(5)]


def test_validation_leaves_the_position_alone(tmp_path: Path) -> None:
    module, datamodule = Recorder(), data(validation_documents=10)
    runner = trainer(tmp_path, max_steps=6, val_check_interval=2, check_val_every_n_epoch=None)
    runner.fit(module, datamodule)
    assert module.steps == list(range(6))
    # A sanity check of up to two batches, then three passes, always the same.
    one_pass = len(list(datamodule.val_dataloader()))
    sanity = min(2, one_pass)
    assert len(module.validated) == sanity + 3 * one_pass
    assert module.validated[sanity:] == 3 * module.validated[-one_pass:]
    assert {number for step in module.validated[-one_pass:] for number in step} == set(range(10))
    assert datamodule.state_dict()["planner"]["step"] == 6
    trainer(tmp_path).validate(module, data(validation_documents=10), verbose=False)


def test_every_data_setting_is_an_argument_of_the_same_default() -> None:
    other = {
        "context_window": 64, "micro_batches": 3, "packing": {"method": "wlb", "queues": 3},
        "cap": 64, "long_documents": "truncate", "seed": 5, "shuffle": False, "max_tokens": 10_000,
    }  # fmt: skip
    assert set(other) == {field.name for field in fields(DataSettings)}
    assert WLBDataModule(sequences(), **other).settings == DataSettings(**other)
    needed = {"context_window": 64, "micro_batches": 3}
    assert WLBDataModule(sequences(), **needed).settings == DataSettings(**needed)


def test_held_out_documents_are_chosen_by_the_seed() -> None:
    store = InMemoryDocuments(sequences())

    def held_out(seed: int) -> list[int]:
        kept, validation = data(documents=store, seed=seed, validation_documents=10)._stores()[:2]
        assert sorted([*kept.numbers, *validation.numbers]) == list(range(40))  # type: ignore[attr-defined]
        return list(validation.numbers)  # type: ignore[attr-defined]

    assert len(held_out(5)) == 10
    assert held_out(5) == held_out(5) != held_out(6)
    own = data(validation_documents=InMemoryDocuments([[1, 2]]))
    kept, validation, _ = own._stores()
    assert (len(kept.lengths), len(validation.lengths)) == (40, 1)


def test_what_is_dropped_and_used_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_wlb.data.datamodule.rank_zero_info", said.append)
    documents = data(
        documents=[[1] * 70, [2] * 30],
        packing="wlb",
        long_documents="truncate",
    )
    documents.trainer = trainer(Path())
    documents.trainer.strategy.connect(Recorder())
    documents.train_dataloader()
    documents.train_dataloader()
    assert len(said) == 2
    assert "2 with 100 tokens (longest 70; longer than the window: 1)" in said[0]
    assert re.search(r"outlier queues from \d+, \d+ tokens", said[0])
    assert "drops 6 tokens per epoch" in said[1]


def test_bad_input_is_answered(tmp_path: Path) -> None:
    class Shapeless(Recorder):
        model_shape = None  # type: ignore[assignment]

    for datamodule, module, message in [
        (data(), Shapeless(), r"Shapeless has model_shape=None. Give the LightningModule a prop"),
        (data(documents=[[1, 200]]), Recorder(), r"201 different tokens, the model a.* of 99"),
    ]:
        with pytest.raises(MisconfigurationException, match=message):
            trainer(tmp_path, max_steps=1).fit(module, datamodule)
    with pytest.raises(MisconfigurationException, match="has no validation_documents"):
        trainer(tmp_path).validate(Recorder(), data())
    with pytest.raises(MisconfigurationException, match="needs a Trainer"):
        data().train_dataloader()
    with pytest.raises(ValueError, match=": of 40 documents, 0 to 39 can"):
        trainer(tmp_path, max_steps=1).fit(Recorder(), data(validation_documents=40))
    with pytest.raises(ValueError, match="holds no documents"):
        trainer(tmp_path, max_steps=1).fit(Recorder(), data(documents=[]))


def test_a_trainer_of_another_namespace_is_refused() -> None:
    stranger = type("Trainer", (), {"__module__": "pytorch_lightning.trainer.trainer"})()
    with pytest.raises(MisconfigurationException, match=r"import lightning\.pytorch as L"):
        data().trainer = stranger
    # Passed by position, such a Trainer takes the data module for a loader and iterates over it.
    with pytest.raises(MisconfigurationException, match=r"import lightning\.pytorch as L"):
        iter(data())


class Evaluated(Recorder):
    def test_step(self, batch: StepBatch, batch_idx: int) -> None:
        self.validated.append(tuple(piece.document for piece in batch.plan.pieces))


def test_test_documents_are_read_once(tmp_path: Path) -> None:
    module = Evaluated()
    store = InMemoryDocuments([[1, 2], [3], [4, 5, 6]])
    trainer(tmp_path).test(module, data(test_documents=store), verbose=False)
    assert sorted(number for step in module.validated for number in step) == [0, 1, 2]
    with pytest.raises(MisconfigurationException, match="No test_documents"):
        trainer(tmp_path).test(Evaluated(), data())


TOKENS = [[number] * 10 for number in range(20)]


def firsts(store) -> set[int]:
    """The documents of a store, by their first token."""
    return {int(store.read(number, 0, 1)[0]) for number in range(len(store.lengths))}


def test_test_documents_are_held_out_beside_those_for_validation() -> None:
    made = WLBDataModule(
        TOKENS, context_window=16, micro_batches=2, validation_documents=4, test_documents=5
    )
    train, validation, test = map(firsts, made._stores())
    assert (len(train), len(validation), len(test)) == (11, 4, 5)
    assert train | validation | test == set(range(20))
    fewer = WLBDataModule(TOKENS, context_window=16, micro_batches=2, validation_documents=4)
    assert firsts(fewer._stores()[1]) == validation


def test_more_test_documents_than_there_are() -> None:
    made = WLBDataModule(
        TOKENS, context_window=16, micro_batches=2, validation_documents=15, test_documents=5
    )
    with pytest.raises(ValueError, match="test_documents=5: of 5 documents, 0 to 4 can"):
        made.setup("fit")
    with pytest.raises(ValueError, match="test_documents"):
        WLBDataModule(TOKENS, context_window=16, micro_batches=2, test_documents=-1)


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_no_checkpoint_makes_a_data_module(tmp_path, weights_only) -> None:
    """Lightning's would import what the arguments of a file name, and unpickle an address."""
    given = {
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        "documents": "stdlib",
        "context_window": 64,
        "micro_batches": 1,
        "profile": {"class_path": "a_module_of_a_stranger.Profile"},
    }
    path = tmp_path / "run.ckpt"
    torch.save({"state_dict": {}, "datamodule_hyper_parameters": given}, path)

    class Own(WLBDataModule):
        pass

    for kind in (WLBDataModule, Own):
        with pytest.raises(ValueError, match=rf"Make a {kind.__name__} of its arguments; trainer"):
            kind.load_from_checkpoint(path, weights_only=weights_only)


def test_other_settings_are_the_last_that_a_resumed_run_says(tmp_path):
    """Lightning's teardown had the last word, and asked for iter(combined_loader)."""
    runner = harness.trainer("auto", 1)
    runner.fit(harness.module(harness.SMALL), harness.data(harness.SMALL))
    runner.save_checkpoint(tmp_path / "a.ckpt")
    again = harness.trainer("auto", 1, max_steps=6)
    other = harness.data(harness.SMALL, micro_batches=2)
    with pytest.raises(ValueError, match="data settings: micro_batches=3 in the saved state, 2"):
        again.fit(harness.module(harness.SMALL), other, ckpt_path=tmp_path / "a.ckpt")


def test_a_position_at_the_beginning_after_steps_is_refused(tmp_path):
    runner = harness.trainer("auto", 1)
    runner.fit(harness.module(harness.SMALL), harness.data(harness.SMALL))
    runner.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt")
    state["WLBDataModule"]["planner"] = None
    torch.save(state, tmp_path / "a.ckpt")
    again = harness.trainer("auto", 1, max_steps=6)
    with pytest.raises(ValueError, match="has no position in the documents of a WLBDataModule"):
        again.fit(
            harness.module(harness.SMALL),
            harness.data(harness.SMALL),
            ckpt_path=tmp_path / "a.ckpt",
        )
