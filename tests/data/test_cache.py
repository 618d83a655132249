"""What is kept is read again where this user has put it, as it was built, and nowhere else."""

import atexit
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_wlb import file_checks
from lightning_wlb.data import cache as cached
from lightning_wlb.data.cache import built_once

pytestmark = pytest.mark.timeout(60)
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, not made yet; the one for temporary files is beside it."""
    monkeypatch.setattr(cached, "user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    (tmp_path / "temporary").mkdir(mode=0o777)
    monkeypatch.setattr(cached.tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache/lightning_wlb"


def build(folder: Path) -> None:
    (folder / "made").write_text("mine")


def poisoned(folder: Path, owner: int | None = NOBODY, key: str = "key") -> Path:
    """What another user, or nobody else, has built under a name."""
    (folder / "aside").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached, "user_cache_dir", lambda name: str(folder / "aside" / name))
        made = built_once(key, lambda each: (each / "made").write_text("theirs") and None)
    made.rename(folder / key)
    if owner is not None:
        for path in (folder / key, folder / key / "made", folder / key / "record.json"):
            os.chown(path, owner, owner)
    return folder / key


def test_a_rank_that_was_first_is_believed(root: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "made").write_text("second")
        poisoned(root, None).joinpath("made")

    assert (built_once("key", build) / "made").read_text() == "theirs"
    assert not list(root.glob(".key*"))


def test_the_users_folder_is_this_users_alone(root: Path) -> None:
    root.mkdir(parents=True, mode=0o755)
    assert built_once("key", build) == root / "key"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_nothing_is_looked_for_among_temporary_files(tmp_path: Path) -> None:
    poisoned(tmp_path / "temporary/lightning_wlb", None)
    assert (built_once("key", build) / "made").read_text() == "mine"


@needs_root
def test_what_another_user_has_put_there_is_made_anew(root: Path) -> None:
    poisoned(root)
    with pytest.warns(match=f"is made anew: .* belongs to user {NOBODY}"):
        assert (built_once("key", build) / "made").read_text() == "mine"


@needs_root
def test_a_folder_of_another_user_is_not_used(root: Path, tmp_path: Path) -> None:
    poisoned(root, None)
    os.chown(root, NOBODY, NOBODY)
    with pytest.warns(match=f"belongs to user {NOBODY}.*XDG_CACHE_HOME"):
        made = built_once("key", build)
    assert (made / "made").read_text() == "mine"
    assert made.parent.parent == tmp_path / "temporary"


def test_what_killed_processes_have_left_is_removed(root: Path) -> None:
    built_once("key", build)
    left = [root / f".key-{name}" for name in ("a1b2c3d4", "a1b2c3d5", "a1b2c3d5-0")]
    for each in left:
        each.mkdir()
        (each / "made").write_text("half")
    for path in (left[0], left[0] / "made", left[2], left[2] / "made"):
        os.utime(path, (0, 0))
    (root / ".hidden").mkdir()
    os.utime(root / ".hidden", (0, 0))
    built_once("other", build)
    assert {each.name for each in root.iterdir()} == {"key", "other", ".hidden", left[1].name}


def test_what_is_kept_is_on_the_disk_before_it_has_its_name(root: Path, monkeypatch) -> None:
    synchronised = []
    monkeypatch.setattr(os, "fsync", lambda file: synchronised.append(os.fstat(file).st_ino))
    made = built_once("key", build)
    assert sorted(synchronised) == sorted(each.stat().st_ino for each in made.iterdir())


def replaced_by_fifo(made: Path) -> None:
    made.unlink()
    os.mkfifo(made)


def replaced_by_link(made: Path) -> None:
    made.rename(made.parent.parent / "elsewhere")
    made.symlink_to("../elsewhere")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "longer": lambda made: made.write_text("longer"),
    "other": lambda made: made.write_text("ours"),
    "missing": Path.unlink,
    "more": lambda made: (made.parent / "more").touch(),
    "fifo": replaced_by_fifo,
    "link": replaced_by_link,
    "record": lambda made: (made.parent / "record.json").write_text("[" * 100_000),
    "no record": lambda made: (made.parent / "record.json").unlink(),
    "the record of another": lambda made: made.parent.rename(made.parent.parent / "other"),
    "folder": lambda made: (made.unlink(), made.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_what_is_not_as_it_was_built_is_made_anew(damage: Any, root: Path) -> None:
    made = built_once("key", build)
    damage(made / "made")
    key = "key" if made.exists() else "other"
    with pytest.warns(match="is made anew"):
        assert (built_once(key, build) / "made").read_text() == "mine"
    assert not list(root.glob(".*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built_once(key, lambda folder: pytest.fail("it is whole"))


def test_ranks_that_replace_the_same_damage_all_have_it_whole(root: Path, monkeypatch) -> None:
    """Between the look of one and its renaming, another has replaced it already."""
    made = built_once("key", build)
    made.joinpath("made").write_text("damaged")
    look, looks = cached._is_whole, []

    def racing(folder: Path) -> bool:
        whole = look(folder)
        looks.append(whole)
        if looks == [False, False]:  # what this rank would rename is damaged no more
            made.joinpath("made").write_text("mine")
        return whole

    monkeypatch.setattr(cached, "_is_whole", racing)
    with pytest.warns(match="is made anew"):
        made = built_once("key", build) / "made"
    assert made.read_text() == "mine"
    assert looks == [False, False, True]
    assert [path.name for path in root.iterdir()] == ["key"]


@pytest.mark.parametrize("kind", ["fifo", "link", "file"])
def test_what_is_no_folder_is_replaced(kind: str, root: Path, tmp_path: Path) -> None:
    root.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(root / "key")
    elif kind == "link":
        (root / "key").symlink_to(poisoned(tmp_path / "elsewhere", None))
    else:
        (root / "key").touch()
    with pytest.warns(match="is made anew"):
        assert (built_once("key", build) / "made").read_text() == "mine"


def test_where_the_folder_cannot_be_used_a_process_has_its_own(root, tmp_path, monkeypatch):
    removals: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", removals.append)
    root.parent.mkdir()
    root.symlink_to(tmp_path)
    with pytest.warns(match=r"is a link, not a folder. Remove it. .*by every process"):
        made = built_once("key", build)
    assert made.parent.parent == tmp_path / "temporary"
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    assert built_once("key", build) == made
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    assert built_once("key", build) != made, "another process does not even look"
    removals[0]()
    assert made.exists(), "only the process that made it removes it"
    monkeypatch.setattr(os, "getpid", lambda: process)
    removals[0]()
    assert not made.parent.exists()


def test_a_user_without_a_home_has_a_folder_for_the_process(root, tmp_path, monkeypatch) -> None:
    def nowhere(_: str) -> str:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("lightning_wlb.data.cache.user_cache_dir", nowhere)
    with pytest.warns(match="cannot be used: Could not determine home"):
        assert built_once("key", build).parent.parent == tmp_path / "temporary"


def test_the_users_cache_folder_is_asked_the_same(root: Path, tmp_path: Path) -> None:
    root.parent.mkdir()
    root.parent.chmod(0o777)
    with pytest.warns(match=rf"Others may write to {root.parent} and exchange"):
        assert built_once("key", build).parent.parent == tmp_path / "temporary"


@pytest.mark.parametrize("mask", [0, 0o002, 0o077])
def test_nobody_else_may_look_into_what_is_kept(mask: int, root: Path) -> None:
    """Whatever the umask; nor could anybody have opened it while it was built."""
    rights = []

    def build_and_look(folder: Path) -> None:
        build(folder)
        rights.append(stat.S_IMODE(folder.stat().st_mode))

    before = os.umask(mask)
    try:
        made = built_once("key", build_and_look)
    finally:
        os.umask(before)
    assert rights == [0o700]
    assert [stat.S_IMODE(each.stat().st_mode) for each in (root, made)] == [0o700, 0o700]


@needs_root
def test_a_file_of_another_user_in_what_is_kept_is_not_read(root: Path) -> None:
    made = built_once("key", build)
    os.chown(made / "made", NOBODY, NOBODY)
    with pytest.warns(match="belongs to user"):
        assert built_once("key", build) == made
    assert (made / "made").stat().st_uid == os.geteuid()


def test_a_process_of_any_number_may_own_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(file_checks, "my_user", lambda: os.geteuid() + 1)
    monkeypatch.setattr(cached, "_temporary_folder", lambda problem, process: pytest.fail(problem))
    with pytest.raises(pytest.fail.Exception, match="belongs to user"):
        built_once("key", build)
