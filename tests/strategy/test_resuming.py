"""What ``ckpt_path`` means: which checkpoints are tried, in which order."""

import os
import shutil
import warnings
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.trainer.states import TrainerFn

from lightning_wlb.checkpoints import manifest
from lightning_wlb.checkpoints.manifest import Damaged
from lightning_wlb.strategy import resuming
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.checkpoints.small_checkpoints import write
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, data, module, trainer


@pytest.fixture
def places(tmp_path, monkeypatch) -> tuple[L.Trainer, dict[str, Path]]:
    """A Trainer, and checkpoints of which later ones come later."""
    paths = [
        tmp_path / "kept" / "last.ckpt",
        tmp_path / "hpc_ckpt_1.ckpt",
        tmp_path / "kept" / "step=9.ckpt",
        tmp_path / "other.ckpt",
    ]
    for time, path in enumerate(paths):
        write(path, 10 - time, time, lr_schedulers=[], slurm_job_id="7" if time == 0 else "6")
    write(tmp_path / "kept" / "weights.ckpt", 1, 99.0)
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        default_root_dir=tmp_path,
        callbacks=[ModelCheckpoint(tmp_path / "kept"), OnExceptionCheckpoint("s3://bucket")],
    )
    for name in ("SLURM_NTASKS", "SLURM_JOB_NAME", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return trainer, {path.name: path for path in paths}


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_last_is_the_newest_of_any_name(places):
    runner, paths = places
    # Of no search for a learning rate that died: initial values, by which a run would begin anew.
    write(paths["last.ckpt"].with_name(".lr_find_0.ckpt"), 0, 99.0, lr_schedulers=[])
    assert names(resuming.candidates(runner, "last", True)) == ["step=9.ckpt", "last.ckpt"]
    # To evaluate, weights are enough.
    assert names(resuming.candidates(runner, "last", False))[0] == "weights.ckpt"
    # Whoever asks for the checkpoint of a time limit gets it, with or without Slurm.
    assert names(resuming.candidates(runner, "hpc", True))[1] == "hpc_ckpt_1.ckpt"
    for asked in (None, "best", "hpc/of/mine", paths["last.ckpt"]):
        assert resuming.candidates(runner, asked, True) == []


def test_in_a_slurm_job(places, monkeypatch):
    runner, paths = places
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    everything = ["step=9.ckpt", "hpc_ckpt_1.ckpt", "last.ckpt"]
    for asked in ("last", "hpc"):
        assert names(resuming.candidates(runner, asked, True)) == everything
    # What a job beside this one has saved in the same folder is not this one's.
    assert names(resuming.candidates(runner, None, True)) == ["last.ckpt"]
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with pytest.warns(UserWarning, match=r"job 8 goes on from what another .*hpc_ckpt_1.ckpt"):
        assert names(resuming.candidates(runner, None, True)) == everything
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert resuming.candidates(runner, None, False) == []
    # A node died before any time limit came: what this job has saved.
    paths["hpc_ckpt_1.ckpt"].rename(paths["hpc_ckpt_1.ckpt"].parent / "away")
    assert resuming.candidates(runner, None, True) == []
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert names(resuming.candidates(runner, None, True)) == ["last.ckpt"]
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with pytest.warns(UserWarning, match=r"requeued job has saved nothing that is found"):
        assert resuming.candidates(runner, None, True) == []


def test_a_folder_means_what_is_in_it(places, tmp_path):
    _, paths = places
    assert names(resuming.candidates_in(tmp_path / "kept", True)) == ["step=9.ckpt", "last.ckpt"]
    last = paths["last.ckpt"]
    assert resuming.candidates_in(last, True) == [last]
    weights = tmp_path / "only" / "weights.ckpt"
    write(weights, 1, 1.0)
    assert resuming.candidates_in(weights.parent, True) == [weights], "which is then refused"
    assert resuming.candidates_in(tmp_path / "nowhere", True) == [tmp_path / "nowhere"]


class Elsewhere(LightningEnvironment):
    """As under torchrun: the processes are there."""

    @property
    def creates_processes_externally(self) -> bool:
        return True


def started(folder: Path, fn: TrainerFn, *callbacks: L.Callback) -> L.Trainer:
    """A Trainer with the strategy, in processes that are there."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        strategy=WLBStrategy(),
        plugins=Elsewhere(),
        callbacks=list(callbacks),
        default_root_dir=folder,
    )
    trainer.state.fn = fn
    return trainer


def test_what_is_asked_for_is_noted_when_a_run_begins(places, tmp_path):
    _, paths = places
    kept = paths["step=9.ckpt"].parent
    trainer = started(tmp_path, TrainerFn.FITTING, ModelCheckpoint(kept))

    def fit(model: str, ckpt_path: str | None = None) -> tuple[str, str | None]:
        return model, ckpt_path

    for asked, taken in (("last", str(kept / "step=9.ckpt")), (None, None), ("best", "best")):
        launch = trainer.strategy.launcher.launch
        assert launch(fit, "model", ckpt_path=asked, trainer=trainer) == ("model", taken)
        assert bool(trainer.strategy.checkpoints._candidates) == (asked == "last")


def test_an_evaluation_in_a_slurm_job_is_of_what_was_trained(places, monkeypatch, tmp_path):
    """Not of what was saved before a time limit, which nobody has asked for."""
    _, paths = places
    trainer = started(tmp_path, TrainerFn.VALIDATING)
    trainer.checkpoint_callback.best_model_path = "the best"
    monkeypatch.setenv("SLURM_NTASKS", "1")
    connector = trainer._checkpoint_connector

    def evaluate(model: str | None, ckpt_path: str | None = None) -> str | None:
        return connector._select_ckpt_path(trainer.state.fn, ckpt_path, model is not None, True)

    launch = trainer.strategy.launcher.launch
    given = str(paths["last.ckpt"])
    for model, asked, taken in (
        ("model", None, None),
        (None, None, "the best"),
        ("model", given, given),
        ("model", "best", "the best"),
    ):
        assert launch(evaluate, model, asked, trainer=trainer) == taken
    trainer.ckpt_path = given
    assert launch(evaluate, "model", trainer=trainer) == given


def test_the_first_that_is_not_damaged():
    def load(path: Path) -> str:
        if path.name != "good":
            raise Damaged(f"{path} is damaged: bits.")
        return "loaded"

    def unreadable(path: Path) -> str:
        if path.name == "bad":
            raise IsADirectoryError(21, "Is a directory", "bad/manifest.json")
        return load(path)

    bad, worse, good = Path("bad"), Path("worse"), Path("good")
    with pytest.warns(match=r"Is a directory: 'bad/manifest.json' Going on from good,"):
        assert resuming.load_first([bad, good], unreadable) == (good, "loaded")
    with pytest.warns(match=r"bad is damaged: bits\. worse is damaged: bits\. Going on from good,"):
        assert resuming.load_first([bad, worse, good], load) == (good, "loaded")
    with pytest.raises(Damaged, match=r"^bad is damaged: bits\.$"):
        resuming.load_first([bad], load)
    with pytest.raises(Damaged, match=r"None of the 2 checkpoints can be used\. bad .* worse "):
        resuming.load_first([bad, worse], load)


def test_by_the_time_that_the_manifest_records(tmp_path):
    late = write(tmp_path / "late.ckpt", 4, 300.0)
    # Set back to an earlier checkpoint, the run wrote an earlier step later.
    again = write(tmp_path / "again.ckpt", 2, 400.0)
    first = write(tmp_path / "first.ckpt", 9, 100.0)
    os.utime(first)  # as a copy has it
    assert resuming.candidates_in(tmp_path, False) == [again, late, first]


def three_attempts(rank: int, folder: Path) -> list[tuple[str, list[str]]]:
    """Attempts of a run; on the node of the second one the clock is an hour slow.

    Of each the checkpoint that it went on from, and the warnings of clocks.
    """
    found = []
    for attempt, clock in enumerate((7200.0, 3600.0, 7300.0), 1):
        runner = trainer(
            WLBStrategy(),
            1,
            max_steps=2 * attempt,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)],
            enable_checkpointing=True,
            default_root_dir=folder,
        )
        with (
            patch.object(manifest.time, "time", lambda clock=clock: clock),
            warnings.catch_warnings(record=True) as said,
        ):
            runner.fit(module(SMALL), data(SMALL), ckpt_path="last")
        clocks = [str(each.message) for each in said if "clock said" in str(each.message)]
        found.append((Path(runner.ckpt_path or "").name, clocks))
    # The second has optimizers too, of the module that it trained.
    for each in (trainer(WLBStrategy(), 1, default_root_dir=folder), runner):
        each.validate(module(SMALL), data(SMALL, validation_documents=4), verbose=False)
        each.save_checkpoint(folder / f"evaluated-{each.global_step}.ckpt")
    return [*found, (resuming.candidates_in(folder, True)[0].name, [])]


def test_the_clock_is_not_believed_where_a_run_knows_better(tmp_path):
    [[first, second, third, after]] = run_ranks(three_attempts, 1, tmp_path, process_group=False)
    assert first[1] == []
    assert second == ("epoch=0-step=2.ckpt", [])
    assert third[0] == "epoch=0-step=4.ckpt"
    assert after[0] == "epoch=0-step=6.ckpt", "an evaluation has nothing to resume from"
    (said,) = third[1]
    assert "step=4.ckpt is the newest: the run that saved it knew of " in said
    assert "step=2.ckpt, although the clock said 3,600 s less. A clock was or is wrong." in said


def test_what_is_a_checkpoint(tmp_path):
    one = write(tmp_path / "one.ckpt", 1, 1.0)
    (tmp_path / ".old").mkdir()
    old = write(tmp_path / ".old" / "two.ckpt", 1, 2.0)
    half = write(tmp_path / "half.ckpt", 1, 3.0)
    (half / "meta.pt").unlink()  # damaged, and to be refused by name
    (tmp_path / "link.ckpt").symlink_to("one.ckpt")
    (tmp_path / "nowhere.ckpt").symlink_to("gone.ckpt")
    (tmp_path / "file.ckpt").write_text("of another strategy")
    (tmp_path / "folder").mkdir()
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "three.ckpt").mkdir()
    manifest.write(tmp_path / "folder", manifest.Manifest(manifest.EXPORT, "save", 1, -1, {}))
    assert set(resuming.checkpoints_in(tmp_path)) == {one, old, half}
    assert set(resuming.checkpoints_in(tmp_path, "t*")) == {old}
    assert resuming.checkpoints_in(tmp_path / "nowhere") == []


def test_checkpoints_before_time_limits(tmp_path):
    paths = [write(tmp_path / f"hpc_ckpt_{n}.ckpt", n, 1.0) for n in (2, 9, 10)]
    other = write(tmp_path / "last.ckpt", 1, 1.0)
    assert resuming.requeue_number(paths[2]) == 10
    assert resuming.requeue_number(other) is None
    assert set(resuming.older_requeues(paths[2])) == set(paths[:2])
    assert resuming.older_requeues(other) == []
    (paths[0] / "meta.pt").write_bytes(b"of a class that only another job trusts")
    assert resuming.older_requeues(paths[2]) == [paths[1]]


def test_what_the_rest_of_a_checkpoint_says(tmp_path):
    mine = write(tmp_path / "mine.ckpt", 1, 1.0, slurm_job_id="7", lr_schedulers=[])
    weights = write(tmp_path / "weights.ckpt", 1, 1.0)
    assert resuming.is_of_job(mine, "7")
    assert not resuming.is_of_job(mine, "8")
    assert not resuming.is_of_job(weights, "7")
    assert resuming.can_resume(mine)
    assert not resuming.can_resume(weights)
    (weights / "meta.pt").write_bytes(b"damaged")
    assert resuming.can_resume(weights)
    assert resuming.is_of_job(weights, "7"), "so that it is refused by name"


def left_inside(rank: int, home: Path) -> list[tuple[list[int], list[int]]]:
    """Steps and epochs of a run; of those resumed after two steps, by the place of the save."""

    def run(
        folder: str, resume: Path | None = None, **options: int
    ) -> tuple[list[int], list[int], L.Trainer]:
        seen: list[tuple[int, int]] = []
        watch = LambdaCallback(
            on_train_batch_end=lambda runner, *_: seen.append(
                (runner.global_step, runner.current_epoch)
            )
        )
        keeper = ModelCheckpoint(home / folder, "end", save_on_train_epoch_end=True)
        given = {"max_steps": -1, "max_epochs": 2, "enable_checkpointing": True}
        runner = trainer(WLBStrategy(2), 2, callbacks=[watch, keeper], **(given | options))
        runner.fit(module(SMALL), data(SMALL), ckpt_path=resume)
        return *map(list, zip(*seen, strict=True)), runner  # type: ignore[return-value]

    *unbroken, _ = run("unbroken")
    *_, left = run("left", max_steps=2)
    left.save_checkpoint(home / "left" / "after.ckpt")
    again = [run(name, home / "left" / f"{name}.ckpt")[:2] for name in ("end", "after")]
    ended = run("once", max_epochs=1)
    rest = run("rest", home / "once" / "end.ckpt")[:2]
    return [tuple(unbroken), *again, ended[:2], rest]  # type: ignore[list-item]


def test_an_epoch_that_a_run_left_is_not_over_for_the_one_that_resumes(tmp_path):
    for unbroken, *again, once, rest in run_ranks(left_inside, 2, tmp_path, process_group=False):
        assert {*unbroken[1]} == {0, 1}
        assert again == [(unbroken[0][2:], unbroken[1][2:])] * 2
        assert [a + b for a, b in zip(once, rest, strict=True)] == list(unbroken)


def test_what_is_remembered_counts_in_folders_of_the_run(places, tmp_path):
    runner, paths = places
    (tmp_path / "kept" / "link").symlink_to(tmp_path)
    (tmp_path / "kept" / "circle").symlink_to("circle")
    path = paths["last.ckpt"]

    def left(*named: object, at: Path = path) -> int:
        states = {"best_model_path": named[0], "best_k_models": dict.fromkeys(named, 0)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            resuming.forget_others(rest := {"callbacks": {"a": states, "b": 1}}, at, runner)
        return len(rest["callbacks"]["a"]["best_k_models"])

    kept = str(tmp_path / "kept")
    assert left(f"{kept}/a.ckpt", f"{kept}/val/b.ckpt", "") == 3
    assert left(f"{kept}/circle/a.ckpt") == 1  # which raises nothing
    # By its name alone ModelCheckpoint would take it for one of its folder, whatever it leads to.
    assert left(f"{kept}/../kept/a.ckpt") == 0
    assert left(f"{tmp_path}/beside.ckpt", at=tmp_path / "other.ckpt") == 1
    for strange in (f"{kept}/../a.ckpt", f"{kept}/link/a.ckpt", "/a.ckpt", "a.ckpt", 7, "\0"):
        assert left(f"{kept}/a.ckpt", strange) == 0, strange
    # A checkpoint of elsewhere knows none in the run's folders: its manifest may claim any run.
    own, handed = paths["last.ckpt"], tmp_path / "elsewhere" / "handed.ckpt"
    shutil.copytree(own, handed)
    assert left(str(own), at=handed) == 0
    assert left(str(own), at=shutil.copytree(own, tmp_path / "hpc_ckpt_2.ckpt")) == 1
    stranger = write(tmp_path / "elsewhere" / "stranger.ckpt", 9, 9.0)
    assert left(str(own), at=stranger) == 0
    assert left(f"{handed}", at=stranger) == 1
    # So does one that lies in a folder which leads to the run's.
    assert left(str(own), at=write(tmp_path / "stranger.ckpt", 9, 9.0)) == 0
    # And one that was copied into them.
    assert left(str(own), at=write(tmp_path / "kept" / "stranger.ckpt", 9, 9.0)) == 0
    assert left(str(own), at=own) == 1


def test_names_that_a_counter_leaves_out_are_looked_at(places, tmp_path):
    """Lightning reads each of them from it, and 0 in place of those that are left out."""
    runner, paths = places
    for name in (*resuming._REMEMBERED, "best_k_models"):
        state: Counter[str] = Counter()
        state[name] = {"/a.ckpt": 0} if "models" in name else "/a.ckpt"  # type: ignore[assignment]
        with pytest.warns(UserWarning, match="/a.ckpt.*are forgotten"):
            resuming.forget_others(rest := {"callbacks": {"a": state}}, paths["last.ckpt"], runner)
        assert rest["callbacks"]["a"] == {
            **dict.fromkeys(resuming._REMEMBERED, ""),
            "best_k_models": {},
        } | {"best_model_score": None}


def test_last_says_where_else_the_logger_has_checkpoints(tmp_path):
    def found() -> tuple[list[Path], list[str]]:
        logger = CSVLogger(tmp_path, name="runs")
        runner = L.Trainer(accelerator="cpu", logger=logger, default_root_dir=tmp_path)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            paths = resuming.candidates(runner, "last", True)
        return paths, [str(each.message) for each in said if "version_" in str(each.message)]

    assert found() == ([], [])
    (tmp_path / "runs/version_0/checkpoints").mkdir(parents=True)
    assert found() == ([], [])
    write(tmp_path / "runs/version_0/checkpoints/step=1.ckpt", 1, 1.0, lr_schedulers=[])
    paths, (said,) = found()
    assert paths == []
    assert "version_1/checkpoints has no checkpoint" in said
    assert "version_0/checkpoints)" in said


def test_a_position_without_its_name_is_not_taken_for_the_beginning():
    with pytest.raises(KeyError, match="planner"):
        data(SMALL).load_state_dict({"planned": None})


def test_what_a_strangers_checkpoint_remembers_is_forgotten_by_whatever_link_it_is_read(scratch):
    """Its manifest may claim to know the run. Where nobody else has put it, it is believed."""
    mine = write(scratch / "step=3.ckpt", 3, 3.0, lr_schedulers=[])
    runner = L.Trainer(default_root_dir=scratch, callbacks=ModelCheckpoint(scratch))
    copy = shutil.copytree(mine, scratch / "step=4.ckpt")
    inside, outside = scratch / "step=5.ckpt", scratch.parent / "link"
    inside.symlink_to(shutil.copytree(mine, scratch.parent / "given"))
    outside.symlink_to(copy)
    cases = [(copy, 0, True), (copy, 65534, False), (outside, 0, True), (outside, 65534, False)]
    for path, owner, believed in [*cases, (inside, 0, False)]:
        os.chown(copy, owner, owner)
        rest = {"callbacks": {"a": {"best_k_models": {str(mine): 0.0}}}}
        resuming.forget_others(rest, path, runner)
        assert rest["callbacks"]["a"]["best_k_models"] == ({str(mine): 0.0} if believed else {})
