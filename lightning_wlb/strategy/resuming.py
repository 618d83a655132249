"""Which checkpoint a run resumes from: what ``ckpt_path`` means under WLBStrategy.

* A checkpoint's own path means that checkpoint. If it is damaged, the run ends.
* ``"best"`` is Lightning's: the path that ModelCheckpoint remembers. When a checkpoint is read,
  ModelCheckpoint forgets paths in it that may be another run's (:func:`forget_others`).
* A folder of checkpoints means the newest undamaged checkpoint in it.
* ``"last"`` means the newest undamaged checkpoint, whatever its name, in the folders of the
  Trainer's checkpoint callbacks; in a Slurm job also among those saved before a time limit
  (``hpc_ckpt_N.ckpt`` in ``default_root_dir``). Lightning would take a ``last.ckpt`` by the file
  system's time, and begin anew if a process died while it replaced the only one. With the default
  logger each attempt has a new folder, ``version_N``: none is found, which a warning says.
* ``"hpc"`` means the same, and counts ``hpc_ckpt_N.ckpt`` outside a Slurm job too.
* None, in a fit of a Slurm job that was requeued or finds an ``hpc_ckpt_N.ckpt``, means the newest
  checkpoint that this job has saved, whatever its name. If this job has saved none, but there is an
  ``hpc_ckpt_N.ckpt``, None means the same as ``"hpc"``, with a warning. Lightning would take the
  newest ``hpc_ckpt_N.ckpt`` of any job, or begin anew.
* None in an evaluation means the weights of the given module, or ``"best"`` without one, in a Slurm
  job too. Lightning would evaluate the newest ``hpc_ckpt_N.ckpt``, saved before training ended.

Lightning chooses on each rank separately, before there are process groups. So ``ckpt_path`` is
noted when the Trainer hands a run to its launcher, and rank 0's list of candidates counts.

The newest checkpoint is the one saved last (:mod:`lightning_wlb.checkpoints.save_order`). A
checkpoint that vanishes, or whose manifest cannot be read, is passed over with a warning, unless
there is no other. Other damage is found when a checkpoint is read; then the next newest is read.
Cost: two small files are read for each checkpoint.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from packaging.version import InvalidVersion, Version

from lightning_wlb.checkpoints import atomic_folders, manifest
from lightning_wlb.checkpoints.manifest import Damaged, Manifest
from lightning_wlb.checkpoints.pickle_checks import load_state
from lightning_wlb.checkpoints.save_order import newest_first, runs_of
from lightning_wlb.checkpoints.writing import REST
from lightning_wlb.file_checks import check_links

_T = TypeVar("_T")

REQUEUE, SEARCH = "hpc_ckpt_*.ckpt", ".lr_find_"
"""Lightning's names for a save before Slurm's time limit, and as a learning rate search begins."""
JOB = "slurm_job_id"
"""The key under which a checkpoint holds the Slurm job that saved it."""
_REMEMBERED = "best_model_path", "kth_best_model_path", "last_model_path"
_VERSION, _STEPS = "pytorch-lightning_version", "epoch_loop.automatic_optimization.optim_progress"
RESUMABLE = "lr_schedulers"
"""The key of learning rate schedules, which Lightning leaves out of a checkpoint of weights."""


def candidates(trainer: pl.Trainer, asked: Any, fitting: bool) -> list[Path]:
    """The checkpoints that ``"last"``, ``"hpc"`` and None may mean, the newest first.

    The list is empty if Lightning's own choice stands. ``fitting`` asks for optimizer state.
    """
    slurm = SLURMEnvironment.detect()
    saved_before_limit = slurm or asked == "hpc"
    requeued = checkpoints_in(Path(trainer.default_root_dir), REQUEUE) if saved_before_limit else []
    found = [*requeued, *(path for each in _folders(trainer) for path in checkpoints_in(each))]
    if asked is None and fitting and slurm and not trainer._checkpoint_connector._user_managed:
        # A job begins anew, unless it has begun before.
        if not requeued and not int(os.environ.get("SLURM_RESTART_COUNT", 0)):
            return []
        job = os.environ["SLURM_JOB_ID"]
        own = [path for path in found if is_of_job(path, job)]
        if own or not requeued:
            if not own:
                rank_zero_warn("This requeued job has saved nothing that is found: it begins anew.")
            return _usable(own, fitting)
        rank_zero_warn(
            f"This job {job} goes on from what another has saved before its time limit:"
            f" {requeued[0]}. If that is not meant, give it a default_root_dir of its own."
        )
    elif asked not in ("last", "hpc"):
        return []
    elif not found:
        _tell_of_other_versions(_folders(trainer))
    return _usable(found, fitting)


def _tell_of_other_versions(folders: Iterable[Path]) -> None:
    """Warn if a run finds no checkpoint, and earlier runs of the same logger have saved some."""
    for folder in folders:
        others = sorted(folder.parent.parent.glob(f"version_*/{folder.name}"))
        saved = [each for each in others if any(map(is_checkpoint, each.glob("*")))]
        if saved and folder.parent.name.startswith("version_"):
            rank_zero_warn(
                f'ckpt_path="last": {folder} has no checkpoint, so nothing is resumed from. Each'
                f" run of this logger has a folder of its own, and {len(saved)} of them have"
                f" checkpoints ({saved[-1]}). To go on from one give that folder as ckpt_path; to"
                " have one folder for all attempts, ModelCheckpoint(dirpath=...)."
            )


@contextmanager
def own_weights(trainer: pl.Trainer, arguments: dict[str, Any]) -> Iterator[None]:
    """Keep Lightning, in an evaluation, from reading an ``hpc_ckpt_N.ckpt`` that nobody asked for.

    ``arguments`` are those of the Trainer's method; they change if no module is given.
    """
    connector = trainer._checkpoint_connector
    asked = arguments.get("ckpt_path") is not None or connector._user_managed
    if asked or not SLURMEnvironment.detect() or connector._hpc_resume_path is None:
        yield
    elif arguments.get("model") is None:
        arguments["ckpt_path"] = "best"
        yield
    else:
        # As if the user had chosen to read none.
        connector._ckpt_path, connector._user_managed = None, True
        try:
            yield
        finally:
            connector._user_managed = False


def candidates_in(path: Path, fitting: bool) -> list[Path]:
    """The checkpoints in a folder, the newest first; the folder itself if it has none."""
    # A stranger may put files, or links to one's own, into an open folder, so that it looks like a
    # checkpoint. A whole one that a stranger has saved with mode 0777 has one owner.
    strange = atomic_folders.strangers([*path.iterdir()], path) if path.is_dir() else []
    if not path.is_dir() or (is_checkpoint(path) and not strange):
        return [path]
    found = _usable(checkpoints_in(path), fitting)
    strange = [each for each in strange if os.path.lexists(each)]  # not those that have vanished
    mixed = [each for each in strange if each.lstat().st_uid != path.stat().st_uid]
    if mixed and not found and is_checkpoint(path):
        raise ValueError(f"{min(mixed)} is another user's. Remove it, or name a checkpoint there.")
    return found or [path]


def load_first(paths: Sequence[Path], load: Callable[[Path], _T]) -> tuple[Path, _T]:
    """Load the first of several checkpoints that is not damaged, and warn of damaged ones.

    ``load`` raises Damaged, or OSError if a file cannot be read, on all ranks alike. The error of a
    single checkpoint is raised as it is. If all of several fail, Damaged is raised.
    """
    refused: list[str] = []
    for path in paths:
        try:
            loaded = load(path)
        except (Damaged, OSError) as error:
            if len(paths) == 1:
                raise
            refused.append(str(error))
            continue
        if refused:
            rank_zero_warn(f"{' '.join(refused)} Going on from {path}, the newest undamaged one.")
        return path, loaded
    raise Damaged(
        f"None of the {len(paths)} checkpoints can be used. {' '.join(refused)} To begin anew,"
        " give ckpt_path=None and another folder for new checkpoints."
    )


def _usable(paths: Iterable[Path], fitting: bool) -> list[Path]:
    """The readable checkpoints, newest first; the unreadable ones if there are no others.

    In a fit only those with optimizer state count; if there are none, the newest alone is returned,
    and refused by name later. A checkpoint of a newer version of this package raises ValueError.
    """
    saved: dict[Path, Manifest] = {}
    unreadable: dict[Path, Exception] = {}
    for path in dict.fromkeys(paths):
        try:
            saved[path] = manifest.read(path)
        except (OSError, Damaged) as error:
            unreadable[path] = error
    ordered = newest_first(saved)
    if fitting:
        ordered = [path for path in ordered if can_resume(path)] or ordered[:1]
    if not ordered:
        return sorted(unreadable)
    for problem in unreadable.values():
        rank_zero_warn(f"{problem} It is passed over.")
    first, latest = ordered[0], max(ordered, key=lambda path: saved[path].time)
    if saved[first].time < saved[latest].time:
        rank_zero_warn(
            f"{first} is the newest: the run that saved it knew of {latest}, although the clock"
            f" said {saved[latest].time - saved[first].time:,.0f} s less. A clock was or is wrong."
        )
    return ordered


def forget_others(rest: dict[str, Any], path: Path, trainer: pl.Trainer) -> None:
    """Remove from a checkpoint the paths remembered by ModelCheckpoint that may be another run's.

    ModelCheckpoint would remove the checkpoints there when better ones come, or take one for the
    best. A path in this run's folders is kept if ``path`` lies in one of them, too, and both share
    a run (:func:`.runs_of`). Any other path is kept if it lies beside ``path``. ``rest``, read at
    ``path``, is changed in place, with a warning.
    """
    own, home = {each.resolve() for each in _folders(trainer)}, path.resolve().parent
    in_run = home in {*own, Path(trainer.default_root_dir).resolve()}
    in_run = in_run and not atomic_folders.strangers([path.resolve()], home)
    known = {*runs_of(path)} if in_run else set()  # a stranger's manifest may claim any run

    @cache
    def counts(each: str) -> bool:
        if _lies_in(each, own):
            saved = runs_of(Path(each)) if each else ()  # none if there is no checkpoint
            return not saved or not known.isdisjoint(saved)
        # Beside it, not deeper: below a folder of downloads there may be other runs.
        return _lies_in(each, {home}) and os.path.realpath(Path(each).parent) == str(home)

    callbacks = rest.get("callbacks")
    callbacks = callbacks if isinstance(callbacks, dict) else {}
    strange: list[str] = []
    for key, state in [*callbacks.items()]:
        # One name is enough: in a Counter, which a stranger may have saved, other names give 0.
        if not isinstance(state, dict) or state.keys().isdisjoint((*_REMEMBERED, "best_k_models")):
            continue
        kept = state.get("best_k_models", {})
        named = [state.get(name, "") for name in _REMEMBERED]
        paths = [*named, *(kept if isinstance(kept, dict) else [kept])]
        if found := [each for each in paths if not (isinstance(each, str) and counts(each))]:
            strange += [each if isinstance(each, str) else _shown(each) for each in found[:3]]
            nothing = dict.fromkeys(_REMEMBERED, "")
            callbacks[key] = {**state, **nothing, "best_k_models": {}, "best_model_score": None}
    if strange:
        rank_zero_warn(
            f"{path} remembers checkpoints that are not this run's, or of runs that it did not know"
            f" ({', '.join(strange[:3])}): they are forgotten, and neither removed nor the best."
        )


def check_counts(rest: Mapping[str, Any], path: Path, trainer: pl.Trainer) -> None:
    """Refuse a checkpoint with counts of steps, epochs or batches that no Trainer saves.

    Lightning begins missing counts at 0. A checkpoint of another version of it may lack some.
    """
    same_version = rest.get(_VERSION) in (None, pl.__version__)

    def compare(own: Any, stored: Any, where: str) -> None:
        kind = type(own)
        wrong = type(stored) is not kind or (kind is int and stored < 0)
        # Other names would replace Lightning's methods.
        if kind is dict and "ready" in own and not wrong:
            wrong = not stored.keys() <= own.keys()
        old = not wrong and where == _VERSION and not _is_from_2_on(stored)
        if old or (wrong and kind in (dict, bool, int, str)):
            raise ValueError(
                f"{path / REST}: {where} is {_shown(stored)}, which no Trainer of Lightning 2"
                " saves. Use another checkpoint."
            )
        for name in own if kind is dict else ():
            if name in stored or same_version:
                compare(own[name], stored.get(name), f"{where}.{name}" if where else name)

    loops = {
        each: getattr(trainer, each).state_dict()
        for each in ("fit_loop", "validate_loop", "test_loop")
    }
    loops["fit_loop"]["state_dict"] = {}  # the state of loaders, which may have none
    compare({"epoch": 0, "global_step": 0, _VERSION: "", "loops": loops}, rest, "")
    taken = rest["loops"]["fit_loop"][_STEPS]["optimizer"]["step"]["total"]["completed"]
    if taken != rest["global_step"]:
        raise ValueError(
            f"{path / REST}: global_step is {rest['global_step']}, and {taken} optimizer steps were"
            " counted, as no Trainer saves it. Use another checkpoint."
        )


def _shown(value: Any) -> str:
    """A number or text as it is, else its type: a list of tensors takes too long to print."""
    plain = value is None or isinstance(value, int | float | str)
    return f"{value!r:.60}" if plain else f"a {type(value).__name__}"


def _is_from_2_on(version: str) -> bool:
    """Whether Lightning 2.0 or later saved it: an older checkpoint would be migrated unchecked."""
    with suppress(InvalidVersion):
        return len(version) < 60 and Version(version) >= Version("2.0.0")
    return False


def _lies_in(path: Any, folders: set[Path]) -> bool:
    """Whether a path, with links resolved, lies below one of the folders; an empty path does."""
    # ModelCheckpoint itself saves no path with "..", and it compares folders by name only.
    if not isinstance(path, str) or "\0" in path or ".." in Path(path).parts:
        return False
    real = Path(os.path.realpath(Path(path).parent))  # resolve() raises where links are a circle
    return not path or not folders.isdisjoint((real, *real.parents))


def _folders(trainer: pl.Trainer) -> list[Path]:
    """The folders of the Trainer's checkpoint callbacks; ValueError for a stranger's link."""
    found: list[Any] = []
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(each, ModelCheckpoint):
            # Before its set-up only this method of Lightning's knows the default folder.
            found.append(each._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        elif isinstance(each, OnExceptionCheckpoint):
            found.append(each.dirpath)
    paths = (Path(each).expanduser() for each in found if "://" not in str(each))
    return [path for path in paths if check_links(path)]  # which raises, or is true


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a folder that was written as a checkpoint, damaged or not.

    A folder that cannot be read is judged by its name, so that no run begins anew beside it.
    """
    if os.path.isfile(path / REST):  # no read permission on the folder is needed
        return True
    try:
        return manifest.read(path).kind == manifest.CHECKPOINT
    except (NotADirectoryError, ValueError):
        return False
    except OSError as error:
        return path.suffix == ".ckpt" and error.errno != errno.ELOOP  # a link to itself


def checkpoints_in(folder: Path, pattern: str = "*") -> list[Path]:
    """The checkpoints in a folder, and those that a save was replacing when it died.

    Left out are links to others of them, the first checkpoint of a learning rate search that died,
    and, with a warning, checkpoints of strangers (:func:`.atomic_folders.strangers`).

    Raises:
        OSError: the folder exists and cannot be read.
    """
    there = sorted(atomic_folders.old_folder(folder / "any").parent.glob(pattern))
    with suppress(FileNotFoundError, NotADirectoryError):
        # Not glob, which takes an unreadable folder for an empty one: the run would begin anew.
        there = sorted(each for each in folder.iterdir() if each.match(pattern)) + there
    there = [each for each in there if not each.name.startswith(SEARCH)]
    there = [path for path in sorted(there, key=Path.is_symlink) if is_checkpoint(path)]
    strange = dict.fromkeys(atomic_folders.strangers(there, folder))
    found: dict[Path, Path] = {}
    for path in (each for each in there if each not in strange):
        found.setdefault(path.resolve(), path)
    if strange:
        names = ", ".join(each.name for each in [*strange][:3])
        rank_zero_warn(
            f"{names} in {folder} are passed over: they are not this user's, or hold what is not,"
            " where others may put files. To go on from one of them give its own path as ckpt_path."
        )
    return list(found.values())


def refuse_strangers(path: Path) -> None:
    """Refuse a stranger's checkpoint that Lightning found by itself, such as a ``last.ckpt``."""
    if path.exists() and atomic_folders.strangers([path], path.parent):
        raise ValueError(
            f"The run would go on from {path}, which is not this user's, and which nobody has"
            " named. If you trust it give its path as ckpt_path, else save to another folder."
        )


def requeue_number(path: Path) -> int | None:
    """N of ``hpc_ckpt_N.ckpt``; None for another name."""
    match = re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", path.name)
    return int(match[1]) if match else None


def older_requeues(path: Path) -> list[Path]:
    """The earlier ones of the same job if ``path`` is an ``hpc_ckpt_N.ckpt``; they may be removed.

    A run resumes from the newest only; ModelCheckpoint saves the checkpoints that are to be kept.
    Those of another job, which may run in the same folder, are left out.
    """
    number, own = requeue_number(path), _rest(path)
    if number is None or not own:
        return []
    saved = checkpoints_in(path.parent, REQUEUE)
    older = [each for each in saved if (requeue_number(each) or 0) < number]
    # A checkpoint that cannot be read may be another job's.
    return [each for each in older if (rest := _rest(each)) and rest.get(JOB) == own.get(JOB)]


def is_of_job(path: Path, job: str | None) -> bool:
    """Whether a Slurm job saved a checkpoint; True if it is too damaged to say."""
    return (rest := _rest(path)) is None or rest.get(JOB) == job


def can_resume(path: Path) -> bool:
    """Whether more than weights was saved; True if a checkpoint is too damaged to say."""
    return (rest := _rest(path)) is None or RESUMABLE in rest


def _rest(path: Path) -> dict[str, Any] | None:
    try:
        return load_state(path / REST)
    except Exception:  # a damaged pickle can lead to any
        return None
