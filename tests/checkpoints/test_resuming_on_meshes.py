"""Resume: 3 steps, save, resume, 3 more equal 6 steps without a break, on this or another mesh."""

import multiprocessing
from functools import cache
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_wlb.checkpoints import atomic_folders
from lightning_wlb.checkpoints.stored_checkpoint import StoredCheckpoint
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import StepPlan
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.checkpoints.small_checkpoints import as_one_file
from tests.ranks import run_ranks
from tests.strategy.harness import Case, Recorder, data, module, relative_error, trainer, whole

HALF, ALL = 3, 6
# Untied: delayed documents wait in the queues after step 3. Tied: step 3 ends an epoch.
UNTIED = Case("wlb", masked=True, layers=2)
TIED = Case("original", "per_document", tied=True, layers=2)
DATA = {UNTIED: {"micro_batches": 4}, TIED: {"micro_batches": 4, "long_documents": "truncate"}}
SCHEDULE = {"warmup_tokens": 200, "decay_tokens": 700}


class Rates(Recorder):
    """Also the learning rate that each step used, and the parameters after half of the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.halfway: dict[str, np.ndarray] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, *given) -> None:
        super().on_train_batch_end(trainer, pl_module, *given)
        if trainer.global_step == HALF:
            self.halfway = {name: whole(each) for name, each in pl_module.named_parameters()}

    def record(self) -> dict:
        return super().record() | {"rates": self.rates, "halfway": self.halfway}


class Saves(L.Callback):
    """After half of the steps: a checkpoint, which is replaced, and one of weights alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == HALF:
            for name in ("mine.ckpt", "mine.ckpt", "weights.ckpt"):
                trainer.save_checkpoint(self.folder / name, weights_only=name == "weights.ckpt")


def fit(mesh, case, steps, *, resume=None, workers=0, callbacks=(), seed=7):
    """The trainer after a run, and its record. ``mesh`` None: ``strategy="auto"``."""
    rates = Rates()
    strategy = "auto" if mesh is None else WLBStrategy(*mesh)
    runner = trainer(
        strategy,
        1 if mesh is None else int(np.prod(mesh)),
        max_steps=steps,
        max_epochs=-1,
        callbacks=[rates, *callbacks],
        # Else Lightning would add a ModelCheckpoint of its own.
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
    )
    model = module(case, **SCHEDULE)
    model.seed = seed
    runner.fit(model, data(case, **DATA[case], num_workers=workers), ckpt_path=resume)
    return runner, rates.record()


def save(rank, mesh, case, folder: Path) -> None:
    """Half of the steps, and a checkpoint after they have ended."""
    runner, _ = fit(mesh, case, HALF)
    runner.save_checkpoint(folder / name_of(mesh, case) / "mine.ckpt")


def resume(mesh, case, path, workers=0) -> dict:
    """The other steps, by a module with other initial weights."""
    return fit(mesh, case, ALL, resume=path, workers=workers, seed=8)[1]


# What runs on two ranks: (saved on, case, resumed on).
PAIRS = [
    ((1, 2, 1, 1), UNTIED, [(1, 2, 1, 1), (2, 1, 1, 1)]),
    ((1, 2, 1, 1), TIED, [(1, 2, 1, 1)]),
    ((1, 1, 2, 1), UNTIED, [(1, 1, 2, 1), (1, 2, 1, 1)]),
    ((2, 1, 1, 1), TIED, [(1, 1, 1, 2)]),
    # Saved before, by other numbers of ranks.
    ((1, 1, 1, 1), TIED, [(1, 2, 1, 1)]),
    ((2, 1, 1, 2), UNTIED, [(1, 2, 1, 1)]),
]
FIRST = PAIRS[0][:2]
"""The pair whose resume on the same mesh has loader workers and starts from ModelCheckpoint's."""


def name_of(mesh, case) -> str:
    return "x".join(map(str, mesh)) + ("-tied" if case.tied else "")


def default_name(folder: Path) -> Path:
    """What ModelCheckpoint called its checkpoint after half of the steps."""
    (found,) = folder.glob(f"epoch=*-step={HALF}.ckpt")
    return found


def two_ranks(rank: int, folder: Path) -> dict:
    # Loader workers are children, which multiprocessing denies to the daemons that ranks are.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    results = {"one module": the_same_module_again(folder / "turn.ckpt")}
    for mesh, case, targets in PAIRS:
        home, first = folder / name_of(mesh, case), (mesh, case) == FIRST
        if mesh in targets:
            keeper = ModelCheckpoint(home, every_n_train_steps=HALF, save_top_k=-1)
            callbacks = [Saves(home), *([keeper] if first else [])]
            results[mesh, case, None] = fit(mesh, case, ALL, callbacks=callbacks)[1]
        elif np.prod(mesh) == 2:
            save(rank, mesh, case, folder)
        for target in targets:
            workers = 2 if first and target == mesh else 0
            path = default_name(home) if workers else home / "mine.ckpt"
            results[mesh, case, target] = resume(target, case, path, workers)
    return results


def the_same_module_again(path: Path) -> dict:
    """What two Trainers in turn make of one module."""
    losses = []
    model, documents = module(UNTIED, **SCHEDULE), data(UNTIED, **DATA[UNTIED])
    for steps in (HALF, ALL):
        rates = Rates()
        runner = trainer(WLBStrategy(1, 2), 2, max_steps=steps, max_epochs=-1, callbacks=[rates])
        runner.fit(model, documents, ckpt_path=path if path.exists() else None)
        if steps == HALF:
            runner.save_checkpoint(path)
        losses += rates.losses
    return rates.record() | {"losses": losses}


def one_rank(rank: int, folder: Path) -> dict:
    home, one = folder / name_of(*FIRST), (1, 1, 1, 1)
    results = {"refusals": refusals(home, folder / "refused")}
    path = folder / name_of((1, 2, 1, 1), TIED) / "mine.ckpt"
    results[(1, 2, 1, 1), TIED, one] = resume(one, TIED, path)
    # A save that dies between two renames leaves the checkpoint that it replaces in `.old`.
    path = folder / name_of((1, 1, 2, 1), UNTIED) / "mine.ckpt"
    atomic_folders.old_folder(path).parent.mkdir()
    path.rename(atomic_folders.old_folder(path))
    with pytest.warns(UserWarning, match=r"mine.ckpt is missing: .* Reading .*\.old.mine.ckpt"):
        results[(1, 1, 2, 1), UNTIED, one] = resume(one, UNTIED, path)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(folder) -> list[dict]:
    """(saved on, case, resumed on or None for the unbroken run) -> record, of both ranks."""
    for mesh, case in (((1, 1, 1, 1), TIED), ((2, 1, 1, 2), UNTIED)):
        run_ranks(save, int(np.prod(mesh)), mesh, case, folder, process_group=False)
    pairs = run_ranks(two_ranks, 2, folder, process_group=False)
    (single,) = run_ranks(one_rank, 1, folder, process_group=False)
    return [pairs[0] | single, pairs[1]]


def runs(results) -> list[tuple]:
    """(saved on, case, resumed on or None, record), and all runs of that rank, of both ranks."""
    return [(*key, got, rank) for rank in results for key, got in rank.items() if len(key) == 3]


@cache
def unbroken(case: Case) -> dict:
    return fit(None, case, ALL)[1]


def same_bits(got: dict, want: dict, where) -> None:
    """After the resume every loss, plan, rate and parameter is that of the unbroken run."""
    for name in ("losses", "plans", "rates"):
        assert got[name] == want[name][HALF:], (where, name)
    assert set(got["parameters"]) == set(want["parameters"])
    for name, value in got["parameters"].items():
        assert np.array_equal(value, want["parameters"][name]), (where, name)


def ten_digits(got: dict, want: dict, where) -> None:
    assert got["losses"] == pytest.approx(want["losses"][HALF:], rel=1e-10), where
    assert got["rates"] == pytest.approx(want["rates"][HALF:], rel=1e-12), where
    for text, expected in zip(got["plans"], want["plans"][HALF:], strict=True):
        assert StepPlan.from_json(text).pieces == StepPlan.from_json(expected).pieces
    for name, value in got["parameters"].items():
        expected = want["parameters"][_name(name, want["parameters"])]
        assert relative_error(value, expected) <= 1e-10, (where, name)


def _name(name: str, names: dict) -> str:
    return name if name in names else name.replace("head.weight", "embed.weight")


def test_the_data_asks_for_what_resume_must_keep(folder, results):
    """Delayed documents at the untied case's checkpoint; an epoch's end at the tied case's."""
    meta = torch.load(default_name(folder / name_of(*FIRST)) / "meta.pt")
    assert any(meta["WLBDataModule"]["planner"]["packer"]["queues"])
    plans = [StepPlan.from_json(text) for text in unbroken(TIED)["plans"]]
    assert (plans[HALF - 1].epoch, plans[HALF].epoch) == (0, 1)
    delayed = [StepPlan.from_json(text).max_delay for text in unbroken(UNTIED)["plans"]]
    assert max(delayed[HALF:]) > 0
    rates = unbroken(UNTIED)["rates"]
    assert rates[0] < rates[2] > rates[3] > rates[5], "a warm-up and a decay by tokens"


def test_on_the_same_mesh_bit_for_bit(results):
    same = [each for each in runs(results) if each[0] == each[2]]
    assert len(same) == 2 * 3
    for mesh, case, _, got, rank in same:
        same_bits(got, rank[mesh, case, None], (mesh, case))


def test_by_the_same_module_bit_for_bit(results):
    """The gradients that the first fit leaves do not keep the optimizer from its state."""
    for rank in results:
        got, want = rank["one module"], rank[*FIRST, None]
        assert got["losses"] == want["losses"]
        same_bits(got | {"losses": got["losses"][HALF:]}, want, "one module")


def test_on_another_mesh_to_ten_digits(results):
    moved = [each for each in runs(results) if each[2] is not None]
    for mesh, case, target, got, _ in moved:
        ten_digits(got, unbroken(case), (mesh, case, target))
    assert {
        ((1, 2, 1, 1), False, (2, 1, 1, 1)),
        ((1, 1, 2, 1), False, (1, 2, 1, 1)),
        ((1, 1, 2, 1), False, (1, 1, 1, 1)),
        ((1, 2, 1, 1), True, (1, 1, 1, 1)),
        ((1, 1, 1, 1), True, (1, 2, 1, 1)),
        ((2, 1, 1, 2), False, (1, 2, 1, 1)),
        ((2, 1, 1, 1), True, (1, 1, 1, 2)),
    } <= {(mesh, case.tied, target) for mesh, case, target, *_ in moved}


def test_a_checkpoint_is_whole_and_of_plain_types(folder, results):
    assert not list(folder.glob("**/.partial"))
    home = folder / name_of(*FIRST)
    (last,) = home.glob(f"epoch=*-step={ALL}.ckpt")
    saved = {home / "mine.ckpt", home / "weights.ckpt", default_name(home), last}
    assert set(home.iterdir()) == saved
    for path in saved:
        names = {file.name for file in path.iterdir()}
        assert names == {"__0_0.distcp", "__1_0.distcp", ".metadata", "meta.pt", "manifest.json"}
    meta = torch.load(home / "mine.ckpt" / "meta.pt", weights_only=True)
    assert meta["global_step"] == HALF
    assert meta["tokens_seen"] == meta["WLBDataModule"]["planner"]["tokens"] > 0
    assert "state_dict" not in meta
    assert "optimizer_states" not in meta


@pytest.mark.parametrize("case", [UNTIED, TIED], ids=["untied", "tied"])
def test_consolidated_it_is_an_ordinary_checkpoint(case, folder, results, tmp_path):
    source, file = folder / name_of((1, 2, 1, 1), case) / "mine.ckpt", tmp_path / "whole.ckpt"
    as_one_file(source, file)
    want = unbroken(case)
    for path in (source, file):
        loaded = LanguageModule.load_from_checkpoint(path)
        assert loaded.config == module(case).config
        parameters = {name: whole(p) for name, p in loaded.double().named_parameters()}
        assert set(parameters) == set(want["halfway"])
        for name, value in parameters.items():
            # load_from_checkpoint makes float32 parameters.
            assert relative_error(value, want["halfway"][name]) <= 1e-7, name
    # Through a Trainer the precision is the Trainer's.
    runner, model = trainer("auto", 1), module(case)
    runner.validate(model, data(case, validation_documents=4), ckpt_path=file, verbose=False)
    for name, value in model.named_parameters():
        assert relative_error(whole(value), want["halfway"][name]) <= 1e-10, name
    # Training goes on as if it had never been on two ranks.
    ten_digits(resume(None, case, file), want, case)


def refusals(home: Path, scratch: Path) -> list[str]:
    messages = []
    scratch.mkdir()
    (scratch / "file.ckpt").write_text("no checkpoint")
    (scratch / "folder.ckpt").mkdir()
    for path, error in (
        (scratch / "file.ckpt", FileNotFoundError),
        (scratch / "folder.ckpt", FileNotFoundError),
        (scratch / "nowhere.ckpt", FileNotFoundError),
        (home / "weights.ckpt", ValueError),
    ):
        with pytest.raises(error) as info:
            resume((1, 1, 1, 1), UNTIED, path)
        messages.append(str(info.value))
    # Weights alone are enough to validate with, and do not touch optimizers.
    runner = trainer(WLBStrategy(), 1, max_steps=1)
    model = module(UNTIED)
    runner.fit(model, data(UNTIED, **DATA[UNTIED], validation_documents=4))
    before = runner.optimizers[0].state_dict()["state"][0]["exp_avg"].clone()
    runner.validate(model, runner.datamodule, ckpt_path=home / "weights.ckpt", verbose=False)
    after = runner.optimizers[0].state_dict()["state"][0]["exp_avg"]
    assert torch.equal(before.full_tensor(), after.full_tensor())
    stored = StoredCheckpoint(home / "weights.ckpt")
    saved = stored.read(stored.names)
    for name, value in model.named_parameters():
        assert relative_error(whole(value), whole(saved[name])) <= 1e-10
    return messages


def test_what_is_not_a_checkpoint_is_answered(folder, results):
    messages = results[0]["refusals"]
    for name, message in zip(("file", "folder", "nowhere"), messages, strict=False):
        assert f"{name}.ckpt is not a checkpoint of WLBStrategy" in message
        assert "Pass what ModelCheckpoint" in message
    assert "weights.ckpt holds weights only, so training cannot resume" in messages[3]
