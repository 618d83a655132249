"""What lies in a folder of checkpoints and is not believed: other users', damaged, made up."""

import errno
import json
import os
import shutil
import warnings
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn

from lightning_wlb.checkpoints import manifest
from lightning_wlb.checkpoints.reading import open_checkpoint
from lightning_wlb.distributed.collective_errors import Ranks
from lightning_wlb.strategy import resuming
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.checkpoints.small_checkpoints import list_anew, write
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, data, module, trainer
from tests.strategy.test_resuming import names


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_what_another_user_has_put_there_is_passed_over(tmp_path):
    """A folder that everybody may write to; and one that this user may not look into."""
    mine, theirs = (write(tmp_path / name, 4, time) for name, time in (("a", 1.0), ("b", 9e99)))
    os.chown(theirs, 65534, 65534)
    assert resuming.candidates_in(tmp_path, False) == [theirs, mine], "a group's"
    for mode in (0o1777, 0o3770):
        tmp_path.chmod(mode)
        with pytest.warns(match=f"b in {tmp_path} are passed over: they are not this user's"):
            assert resuming.candidates_in(tmp_path, False) == [mine]
    (tmp_path / "link").symlink_to(theirs)
    with pytest.warns(match="b, link in"):
        assert resuming.candidates_in(tmp_path, False) == [mine]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("mode", [0o1777, 0o3770, 0o775])
def test_nor_is_what_lies_in_a_folder_that_another_user_has_put_there(mode, tmp_path):
    """A stranger makes ``checkpoints``, or what leads there, or a link, where anybody may."""
    tmp_path.chmod(mode)
    open_to_all = mode != 0o775
    for at in (tmp_path / "checkpoints", tmp_path / "run/checkpoints"):
        mine, theirs = (write(at / name, 4, time) for name, time in (("a", 1.0), ("b", 9e99)))
        first = tmp_path / at.relative_to(tmp_path).parts[0]
        for each in (theirs, first):
            os.chown(each, 65534, 65534)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert resuming.candidates_in(at, False) == [*([] if open_to_all else [theirs]), mine]
        assert len(said) == open_to_all
        os.chown(first, 0, 0)
    (tmp_path / "link").symlink_to("run")
    at = tmp_path / "link/checkpoints"
    assert resuming.candidates_in(at, False) == [at / "b", at / "a"]
    os.chown(tmp_path / "link", 65534, 65534, follow_symlinks=False)
    assert len(resuming.checkpoints_in(at)) == (0 if open_to_all else 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("keeper", [ModelCheckpoint, OnExceptionCheckpoint])
def test_no_run_goes_on_from_or_saves_to_where_a_strangers_link_leads(
    keeper, tmp_path, monkeypatch
):
    """Lightning resolves the folder of a ModelCheckpoint, and the link is seen no more."""
    saved = write(tmp_path / "mine/a", 4, 1.0, lr_schedulers=[])
    (tmp_path / "run").symlink_to("mine")
    tmp_path.chmod(0o1777)

    def found(asked: str | None) -> list[Path]:
        given = {"enable_checkpointing": True, "callbacks": [keeper(tmp_path / "run/..//run")]}
        return resuming.candidates(trainer(WLBStrategy(), 1, **given), asked, True)

    assert [each.resolve() for each in found("last")] == [saved]
    assert ModelCheckpoint(tmp_path / "run").dirpath == str(tmp_path / "mine")
    os.chown(tmp_path / "run", 65534, 65534, follow_symlinks=False)
    for asked in ("last", None):
        said = f"leads to {tmp_path}/mine by {tmp_path}/run, a link of user 65534, where others"
        with pytest.raises(ValueError, match=said):
            found(asked)
    monkeypatch.chdir(tmp_path)
    for given, kept in (("run", f"{tmp_path}/run"), ("memory://run", "memory://run"), (None, None)):
        assert ModelCheckpoint(given).dirpath == kept
    tmp_path.chmod(0o755)
    assert [each.resolve() for each in found("last")] == [saved], "nobody else may put one there"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_a_link_that_is_there_for_a_moment_leads_nowhere(tmp_path, monkeypatch):
    """What it is judged by is what it is resolved by: a stranger may exchange it in between."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    link, resolve = tmp_path / "open/run", os.path.realpath

    def quickly(path, **options):
        link.symlink_to(tmp_path / "mine")
        os.chown(link, 65534, 65534, follow_symlinks=False)
        try:
            return resolve(path, **options)
        finally:
            link.unlink()

    monkeypatch.setattr(os.path, "realpath", quickly)
    assert ModelCheckpoint(link).dirpath == str(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_what_is_saved_at_slurms_time_limit_is_seen_before_the_first_step(tmp_path):
    """It would be refused then, and the job not requeued."""
    (tmp_path / "run").symlink_to(tmp_path)
    os.chown(tmp_path / "run", 65534, 65534, follow_symlinks=False)
    runner = trainer(WLBStrategy(), 1, default_root_dir=tmp_path / "run")
    for mode, fn in ((0o755, TrainerFn.FITTING), (0o1777, TrainerFn.VALIDATING)):
        tmp_path.chmod(mode)
        runner.state.fn = fn
        runner.strategy.checkpoints.check_folders(runner, SLURMEnvironment())
    runner.state.fn = TrainerFn.FITTING
    with pytest.raises(ValueError, match=f"by {tmp_path}/run, a link of user 65534, where others"):
        runner.strategy.checkpoints.check_folders(runner, SLURMEnvironment())


def planted(rank: int, home: Path) -> list[str]:
    """What is said of the checkpoints of another user that Lightning would find by itself."""
    runner = trainer(WLBStrategy(), 1, max_steps=1)
    runner.fit(module(SMALL), data(SMALL))
    for name in ("checkpoints/last.ckpt", "hpc_ckpt_1.ckpt"):
        runner.save_checkpoint(home / name)
        os.chown(home / name, 65534, 65534)
    for each in (home, home / "checkpoints"):
        each.chmod(0o1777)
    said = []
    for asked in ("last", "hpc", home / "checkpoints/last.ckpt"):
        options = {"default_root_dir": home, "enable_checkpointing": True, "max_steps": 1}
        try:
            again = trainer(WLBStrategy(), 1, logger=False, **options)
            again.fit(module(SMALL), data(SMALL), ckpt_path=asked)
            said.append("read")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_nor_does_lightnings_own_choice_take_it(tmp_path):
    (said,) = run_ranks(planted, 1, tmp_path, process_group=False)
    assert said[2] == "read"
    for each, name in zip(said, ("checkpoints/last.ckpt", "hpc_ckpt_1.ckpt"), strict=False):
        assert f"from {tmp_path / name}, which is not this user's, and which nobody" in each


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_what_another_user_says_was_there_before_is_not_read(tmp_path):
    """A save that died leaves what it was to replace in ``.old``, where anybody may put one."""
    mine, theirs = (write(tmp_path / name, 4, 1.0) for name in ("mine", ".old/best"))
    for each in (theirs.parent, theirs):
        os.chown(each, 65534, 65534)
    for mode in (0o755, 0o1777):
        tmp_path.chmod(mode)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = set(resuming.checkpoints_in(tmp_path))
        assert found == ({mine, theirs} if mode == 0o755 else {mine})
        assert ["best in " in str(each.message) for each in said] == (
            [] if mode == 0o755 else [True]
        )
    with pytest.raises(FileNotFoundError, match=r"best is missing, and \S+best is not this user's"):
        open_checkpoint(tmp_path / "best", Ranks(alone=True))


def test_a_folder_that_may_not_be_looked_into_is_no_checkpoint(tmp_path, monkeypatch):
    mine, stat = write(tmp_path / "mine", 4, 1.0), os.stat
    (tmp_path / "lost+found").mkdir()

    def refuse(path, **options):
        if "lost+found/" in os.fspath(path):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert resuming.candidates_in(tmp_path, False) == [mine]


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE])
def test_no_run_begins_anew_beside_what_cannot_be_looked_into(code, tmp_path, monkeypatch):
    """A colleague's run whose umask was 077, or a handle of a network file system that is stale."""
    closed, stat, read = write(tmp_path / "step=4.ckpt", 4, 1.0), os.stat, manifest.read_json

    def refuse(path, **options):
        if closed in Path(path).parents:
            raise OSError(code, os.strerror(code), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(manifest, "read_json", lambda path: (refuse(path), read(path))[1])
    (tmp_path / "last.ckpt").symlink_to("last.ckpt")
    assert resuming.candidates_in(tmp_path, False) == [closed]
    mine = write(tmp_path / "mine", 4, 1.0)
    with pytest.warns(match=r"step=4\.ckpt/\S+' It is passed over"):
        assert resuming.candidates_in(tmp_path, False) == [mine]

    assert resuming.checkpoints_in(tmp_path / "nowhere") == []

    def list_nothing(path="."):
        raise OSError(code, os.strerror(code), str(path))

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, list_nothing)
    with pytest.raises(OSError, match=os.strerror(code)):
        resuming.checkpoints_in(tmp_path)


def hostile(content: dict[str, object]) -> str:
    return json.dumps({"content": content, "crc32": manifest._checksum(content)})


@pytest.mark.parametrize(
    "damage",
    ["{}", "[" * 100_000, "text as time", "vanishes"],
    ids=["empty", "brackets", "text", "vanishes"],
)
def test_what_cannot_be_read_is_one_warning_and_no_candidate(damage, tmp_path, monkeypatch):
    good, bad = (write(tmp_path / name, 4, 300.0, lr_schedulers=[]) for name in ("good", "bad"))
    if damage == "vanishes":
        found = resuming.checkpoints_in(tmp_path)
        bad.rename(tmp_path.parent / f"{tmp_path.name} away")
        monkeypatch.setattr(resuming, "checkpoints_in", lambda folder: found)
    elif damage == "text as time":
        content = json.loads((bad / manifest.NAME).read_bytes())["content"]
        (bad / manifest.NAME).write_text(hostile(content | {"time": "late"}))
    else:
        (bad / manifest.NAME).write_text(damage)
    with pytest.warns(match=f"{bad} is damaged: manifest.json .* It is passed over") as said:
        assert resuming.candidates_in(tmp_path, True) == [good]
    assert len(said) == 1
    # Where there is no other it is tried, and refused by name: a run must not begin anew silently.
    (good / manifest.NAME).unlink()
    if damage != "vanishes":
        assert resuming.candidates_in(tmp_path, True) == [bad, good]


def test_what_a_newer_version_wrote_is_not_passed_over(tmp_path):
    new, _ = (write(tmp_path / name, 4, 300.0, lr_schedulers=[]) for name in ("new", "old"))
    content = json.loads((new / manifest.NAME).read_bytes())["content"]
    (new / manifest.NAME).write_text(hostile(content | {"format": 9}))
    with pytest.raises(ValueError, match=r"newer version .*format 9.* Update"):
        resuming.candidates_in(tmp_path, True)


def strangers(rank: int, home: Path) -> tuple[list[str], list[str], str, list[bool]]:
    """A run that resumes from what remembers other folders, and one that saves after evaluating."""
    kept = home / "kept"

    def run(steps: int, **options: object) -> L.Trainer:
        keeper = ModelCheckpoint(kept, monitor="train_loss", mode="max", every_n_train_steps=1)
        given = {"max_steps": steps, "callbacks": [keeper], "enable_checkpointing": True}
        runner = trainer(WLBStrategy(), 1, **given)
        runner.fit(module(SMALL), data(SMALL, validation_documents=4), **options)
        return runner

    run(1)
    (first,) = kept.iterdir()
    shutil.copytree(first, home / "victim" / "one.ckpt")
    rest = torch.load(first / "meta.pt", weights_only=True)
    (state,) = (each for each in rest["callbacks"].values() if "best_k_models" in each)
    theirs = str(kept / ".." / "victim" / "one.ckpt")
    state.update(dict.fromkeys(resuming._REMEMBERED, theirs))
    state["best_k_models"] = {theirs: torch.tensor(-9.0)}
    torch.save(rest, first / "meta.pt")
    list_anew(first)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        runner = run(2, ckpt_path=first)
    best = runner.checkpoint_callback.best_model_path
    runner.save_checkpoint(home / "trained.ckpt")
    runner.validate(datamodule=runner.datamodule, ckpt_path=home / "victim/one.ckpt", verbose=False)
    runner.save_checkpoint(home / "evaluated.ckpt")
    runner.fit_loop.max_epochs, runner.fit_loop.epoch_loop.max_steps = 9, 3
    runner.fit(runner.lightning_module, runner.datamodule)
    runner.save_checkpoint(home / "again.ckpt")
    other = trainer(WLBStrategy(), 1)
    given = data(SMALL, validation_documents=4)
    other.validate(
        runner.lightning_module, given, ckpt_path=home / "victim/one.ckpt", verbose=False
    )
    runner.save_checkpoint(home / "other.ckpt")
    saved = ("trained", "evaluated", "again", "other")
    resumable = [resuming.can_resume(home / f"{name}.ckpt") for name in saved]
    there = names(list((home / "victim").iterdir()))
    return there, [str(each.message) for each in said], best, resumable


def test_what_a_stranger_remembers_is_not_removed_and_an_evaluated_one_not_resumed(tmp_path):
    ((there, said, best, resumable),) = run_ranks(strangers, 1, tmp_path, process_group=False)
    assert there == ["one.ckpt"]
    assert sum("they are forgotten, and neither removed nor the best" in each for each in said) == 1
    assert Path(best).parent == tmp_path / "kept"
    # Weights of one checkpoint with the optimizers of another are nothing to go on from.
    assert resumable == [True, False, True, False]


def counts(rank: int, home: Path) -> list[str]:
    """What is said of checkpoints whose counts somebody has changed; all of them verify."""
    runner = trainer(WLBStrategy(), 1, max_steps=1)
    runner.fit(module(SMALL), data(SMALL))
    runner.save_checkpoint(home / "run.ckpt")
    said = []
    for keys, value in (
        (("loops", "fit_loop", "epoch_progress", "current", "ready"), "3"),
        (("loops", "fit_loop", "epoch_loop.batch_progress", "total"), [1]),
        (("loops", "fit_loop", "epoch_loop.batch_progress", "current", "reset"), 1),
        (("loops", "fit_loop", "epoch_loop.batch_progress", "is_last_batch"), 1),
        (("loops", "fit_loop", "epoch_loop.state_dict", "_batches_that_stepped"), -1),
        (("loops",), None),
        (("global_step",), True),
        (("pytorch-lightning_version",), 2),
        (("pytorch-lightning_version",), "0.9.0"),
        (("pytorch-lightning_version",), "1" * 5000),
        (("pytorch-lightning_version",), "2.0rc0"),
        (("pytorch-lightning_version",), "2.0zzz"),
        (("tokens_seen",), "many"),
        # What Lightning would begin at 0 with, beside documents that go on.
        (("loops", "fit_loop", "epoch_loop.batch_progress"), None),
        (("loops", "fit_loop", resuming._STEPS, "optimizer", "step", "total", "completed"), 0),
    ):
        rest = torch.load(home / "run.ckpt" / "meta.pt", weights_only=True)
        place = rest
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        if keys[-1] == "epoch_loop.batch_progress":
            del place[keys[-1]]
        shutil.copytree(home / "run.ckpt", home / "made.ckpt")
        torch.save(rest, home / "made.ckpt" / "meta.pt")
        list_anew(home / "made.ckpt")
        with pytest.raises(ValueError, match=f"{keys[-1]}|optimizer steps|current") as error:
            trainer(WLBStrategy(), 1, max_steps=2).fit(
                module(SMALL), data(SMALL), ckpt_path=home / "made.ckpt"
            )
        said.append(str(error.value))
        shutil.rmtree(home / "made.ckpt")
    return said


def test_counts_of_another_type_are_named(tmp_path):
    (said,) = run_ranks(counts, 1, tmp_path, process_group=False)
    for each, field in zip(
        said,
        (
            "meta.pt: loops.fit_loop.epoch_progress.current.ready is '3', which no Trainer",
            "loops.fit_loop.epoch_loop.batch_progress.total is a list, which",
            "loops.fit_loop.epoch_loop.batch_progress.current is a dict, which",
            "loops.fit_loop.epoch_loop.batch_progress.is_last_batch is 1, which",
            "loops.fit_loop.epoch_loop.state_dict._batches_that_stepped is -1, which",
            "loops is None, which",
            "global_step is True, which",
            "pytorch-lightning_version is 2, which",
            "pytorch-lightning_version is '0.9.0', which no Trainer of Lightning 2 saves",
            "pytorch-lightning_version is '1111",
            "pytorch-lightning_version is '2.0rc0', which no Trainer of Lightning 2 saves",
            "pytorch-lightning_version is '2.0zzz', which",
            "the checkpoint's tokens_seen='many'",
            "loops.fit_loop.epoch_loop.batch_progress is None, which",
            "global_step is 1, and 0 optimizer steps were counted",
        ),
        strict=True,
    ):
        assert field in each


def test_what_a_stranger_puts_into_an_open_folder_of_checkpoints_leads_no_run(scratch):
    mine = write(scratch / "step=3.ckpt", 3, 3.0, lr_schedulers=[])
    other = write(scratch / "theirs" / "step=9.ckpt", 9, 9.0, lr_schedulers=[])
    runner = L.Trainer(default_root_dir=scratch, callbacks=ModelCheckpoint(scratch))
    for name, leads in ((".old", scratch.parent), ("long.ckpt", "a" * 300)):
        (scratch / name).symlink_to(leads)
        os.lchown(scratch / name, 65534, 65534)
    assert resuming.candidates(runner, "last", True) == [mine]
    for put, maker in ((os.symlink, 0), (shutil.copy, 65534), (shutil.copy, 0)):
        os.chown(scratch, maker, maker)
        for each in (mine if put is os.symlink else other).iterdir():
            (scratch / each.name).unlink(missing_ok=True)
            put(each, scratch / each.name)
            os.lchown(scratch / each.name, 65534, 65534)
        assert resuming.candidates_in(scratch, True) == [mine]
    away = mine.rename(scratch.parent / "away")
    with pytest.raises(ValueError, match=r"scratch/\S+ is another user's. Remove it"):
        resuming.candidates_in(scratch, True)
    away.rename(mine)
    for each in (other, *other.iterdir()):
        os.chown(each, 65534, 65534)
    other.chmod(0o777)
    assert resuming.candidates_in(other, True) == [other], "which was asked for"
