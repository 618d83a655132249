"""A folder has its final name only when it is whole, and takes only what was written here."""

import os
import sys
from pathlib import Path

import pytest

from lightning_wlb.checkpoints import atomic_folders, manifest
from lightning_wlb.checkpoints.atomic_folders import PartialFolder
from tests.checkpoints.small_checkpoints import load, save

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


def write(path: Path, text: str, kind: str = manifest.CHECKPOINT) -> PartialFolder:
    aside = atomic_folders.begin(path, kind)
    (aside.folder / "__0_0.distcp").write_text(text)
    files = {each.name: manifest.durable(each) for each in aside.folder.iterdir()}
    manifest.write(aside.folder, manifest.Manifest(kind, aside.save, 1, 0, files))
    return aside


def text(path: Path) -> str:
    return (path / "__0_0.distcp").read_text()


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_what_stood_there_stays_until_the_new_folder_is_whole(exchange, tmp_path, monkeypatch):
    if exchange and not sys.platform.startswith("linux"):
        pytest.skip("renameat2 is Linux's")
    names, before = [], atomic_folders.reached
    if not exchange:
        monkeypatch.setattr(atomic_folders, "_exchange", lambda one, other: False)
    monkeypatch.setattr(
        atomic_folders, "reached", lambda point: names.append(point) or before(point)
    )
    path = tmp_path / "folder"
    aside = write(path, "one")
    assert not path.exists()
    atomic_folders.finish(aside)
    aside = write(path, "two")
    assert text(path) == "one"
    names.clear()
    atomic_folders.finish(aside)
    assert text(path) == "two"
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
    assert names == [*([] if exchange else ["moved"]), "named", "synchronised", "removed"]


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    atomic_folders.finish(write(tmp_path / "one", "one"))
    for name, target in (("link", "one"), ("nowhere", "gone")):
        (tmp_path / name).symlink_to(target)
        atomic_folders.finish(write(tmp_path / name, "two"))
        assert not (tmp_path / name).is_symlink()
        assert text(tmp_path / name) == "two"
    assert text(tmp_path / "one") == "one"


@pytest.mark.parametrize(
    ("point", "there", "exchange"),
    [
        ("named", False, True),
        ("named", True, True),
        ("named", True, False),
        ("moved", True, False),
    ],
)
def test_an_error_before_the_end_leaves_everything_as_it_was(
    point, there, exchange, tmp_path, monkeypatch
):
    path, before = tmp_path / "folder", atomic_folders.reached
    if there:
        atomic_folders.finish(write(path, "one"))
    aside = write(path, "two")
    if not exchange:
        monkeypatch.setattr(atomic_folders, "_exchange", lambda one, other: False)
    monkeypatch.setattr(
        atomic_folders, "reached", lambda each: 1 / 0 if each == point else before(each)
    )
    with pytest.raises(ZeroDivisionError):
        atomic_folders.finish(aside)
    assert text(aside.folder) == "two"
    atomic_folders.discard(aside)
    assert not there or text(path) == "one"
    assert [each.name for each in tmp_path.iterdir()] == (["folder"] if there else [])


def test_what_died_is_removed_when_it_is_stale(tmp_path):
    stale, fresh = (write(tmp_path / name, "half").folder for name in ("mine", "other"))
    for each in (stale, *stale.iterdir()):
        os.utime(each, (0, 0))
    mine = atomic_folders.begin(tmp_path / "mine", manifest.CHECKPOINT).folder
    # Two runs that save under one name write into two folders.
    again = atomic_folders.begin(tmp_path / "mine", manifest.CHECKPOINT).folder
    assert set(mine.parent.iterdir()) == {fresh, mine, again}


def test_what_somebody_else_keeps_there_stays(tmp_path):
    """Names that no save has given, in the folders in which saves tidy up."""
    for name in (".partial/thesis", ".old/run/notes"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("precious")
        os.utime(tmp_path / name, (0, 0))
    with pytest.raises(ValueError, match=r"\.old/run is not .* it holds notes, which would be"):
        write(tmp_path / "run", "new")
    atomic_folders.finish(write(tmp_path / "other", "new"))
    atomic_folders.remove(tmp_path / "other")
    atomic_folders.remove(tmp_path / "gone" / "other")
    found = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file()}
    assert found == {".partial/thesis", ".old/run/notes"}


@needs_root
@pytest.mark.parametrize("name", [".partial", ".old"])
def test_nothing_is_written_where_somebody_else_could_exchange_it(name, tmp_path):
    (tmp_path / name).mkdir()
    os.chown(tmp_path / name, NOBODY, NOBODY)
    atomic_folders.discard(write(tmp_path / "run", "in a folder of a group"))
    (tmp_path / name).mkdir(exist_ok=True)
    os.chown(tmp_path / name, NOBODY, NOBODY)
    tmp_path.chmod(0o1777)
    for owner in (0, NOBODY):  # so a user namespace shows every user whom it does not have
        os.chown(tmp_path, owner, owner)
        with pytest.raises(ValueError, match=rf"{name} belongs to user {NOBODY}, who could exch"):
            write(tmp_path / "run", "new")
        assert not list((tmp_path / ".partial").glob("run*"))


@needs_root
def test_root_is_no_stranger(tmp_path, monkeypatch):
    """As where a container of root's has saved into a user's folder."""

    def refused(dir):
        raise OSError

    monkeypatch.setattr(atomic_folders, "TemporaryFile", refused)
    monkeypatch.setattr(atomic_folders, "my_user", lambda: 1234)
    tmp_path.chmod(0o1777)
    for name, owner in (("mine", 1234), ("roots", 0), ("theirs", NOBODY)):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, owner, owner)
    assert atomic_folders.strangers([*tmp_path.iterdir()], tmp_path) == [tmp_path / "theirs"]


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_an_open_folder_is_as_strange_as_what_lies_in_it(mode, tmp_path, monkeypatch):
    """A stranger may have put a whole checkpoint into one of root's or this user's."""
    tmp_path.chmod(mode)
    owners = {"mine": (0, 0), "filled": (0, NOBODY), "closed": (0, NOBODY), "theirs": (1234, 1234)}
    for name, (maker, writer) in owners.items():
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755 if name == "closed" else 0o1777)
        (tmp_path / name / "meta.pt").touch()
        os.chown(tmp_path / name, maker, maker)
        os.chown(tmp_path / name / "meta.pt", writer, writer)
    strange = atomic_folders.strangers([tmp_path / name for name in owners], tmp_path)
    assert [each.name for each in strange] == ["filled", "theirs"][: 1 + (mode == 0o1777)]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", lambda _: (tmp_path / "vanished").stat())
        assert atomic_folders.strangers([tmp_path / "mine"], tmp_path) == [tmp_path / "mine"]
    (tmp_path / "mine" / "__0_0.distcp").symlink_to(tmp_path / "filled" / "meta.pt")
    os.lchown(tmp_path / "mine" / "__0_0.distcp", NOBODY, NOBODY)
    assert atomic_folders.strangers([tmp_path / "mine"], tmp_path) == [tmp_path / "mine"]


@needs_root
def test_nothing_is_written_to_where_a_strangers_link_leads(tmp_path):
    """One in a sticky folder, where this user's run is to save: to another run of this user's."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    atomic_folders.discard(write(tmp_path / "link/one", "new"))
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    atomic_folders.discard(write(tmp_path / "link/one", "in a folder of a group"))
    tmp_path.chmod(0o1777)
    with pytest.raises(ValueError, match=f"by {tmp_path}/link, a link of user {NOBODY}, where oth"):
        write(tmp_path / "link/one", "new")
    assert not list((tmp_path / "run").iterdir())


def test_a_link_is_replaced_again_and_again_without_renameat2(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_folders, "_exchange", lambda one, other: False)
    atomic_folders.finish(write(tmp_path / "first", "first"))
    (tmp_path / "last").symlink_to("first")
    for number in ("1", "2", "3"):
        atomic_folders.finish(write(tmp_path / "last", number))
        assert text(tmp_path / "last") == number
    assert text(tmp_path / "first") == "first"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["first", "last"]


@pytest.mark.parametrize("exchange", [True, False])
def test_nor_behind_one_that_is_made_while_the_folder_is_written(exchange, tmp_path, monkeypatch):
    if not exchange:
        monkeypatch.setattr(atomic_folders, "_exchange", lambda one, other: False)
    precious, folder = tmp_path / "precious", tmp_path / "shared"
    for each in (precious, folder):
        atomic_folders.finish(write(each / "run", "mine"))
    aside = write(folder / "run", "new")
    (folder / ".old").symlink_to(precious)
    if exchange:
        atomic_folders.finish(aside)
    else:
        with pytest.raises(OSError, match=r"\.old"):
            atomic_folders.finish(aside)
    assert text(precious / "run") == "mine"
    assert text(folder / "run") == ("new" if exchange else "mine")


@needs_root
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nothing_is_removed_where_a_strangers_folder_leads_by_then(when, tmp_path, monkeypatch):
    """He may exchange it for a link while a run trains that saves below it."""
    precious, folder, away = (tmp_path / name for name in ("precious", "theirs", "away"))
    for each in (precious, folder):
        atomic_folders.finish(write(each / "run", each.name))
    tmp_path.chmod(0o1777)

    def exchange(path=None):
        folder.rename(away)
        if when == "before":
            folder.symlink_to(precious)
            os.lchown(folder, NOBODY, NOBODY)
        else:
            precious.rename(folder)

    if when == "before":
        exchange()
    else:
        monkeypatch.setattr(atomic_folders, "check_links", exchange)
    with pytest.raises(
        ValueError, match=r"a link of user 65534, where|was exchanged while run was"
    ):
        atomic_folders.remove(folder / "run")
    assert (text(folder / "run"), text(away / "run")) == ("precious", "theirs")


@pytest.mark.parametrize("name", [".partial", ".old"])
def test_nothing_is_removed_behind_a_link_beside_it(name, tmp_path):
    """Somebody hands over a folder in which saves would tidy up another one."""
    precious, folder = tmp_path / "precious", tmp_path / "handed"
    atomic_folders.finish(write(precious / "run", "mine"))
    for each in (precious, *precious.rglob("*")):
        os.utime(each, (0, 0))
    atomic_folders.finish(write(folder / "run", "theirs"))
    (folder / name).symlink_to(precious)
    with pytest.raises(ValueError, match="is a link"):
        atomic_folders.finish(write(folder / "run", "new"))
    with pytest.raises(ValueError, match="is a link"):
        atomic_folders.remove(folder / "run")
    assert text(precious / "run") == "mine"
    assert [each.name for each in precious.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["notes.txt"], r"notes\.txt, which"),
        (["a", "b", "c", "d", "e"], "a, b, c and 2 more, which"),
        # The folder of all checkpoints, one of another library, one with somebody's file.
        (["run.ckpt/meta.pt"], r"run\.ckpt, which"),
        ([".metadata", "__0_0.distcp"], r"\.metadata, __0_0\.distcp, which"),
        (["meta.pt", ".metadata", "__0_0.distcp", "notes.txt"], r"notes\.txt, which"),
        (["manifest.json", "notes.txt"], r"notes\.txt, which"),
    ],
)
def test_what_was_not_written_here_is_not_replaced(names, said, tmp_path):
    path = tmp_path / "mine"
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("precious")
    with pytest.raises(ValueError, match=f"mine is not a lightning_wlb checkpoint: .*{said} would"):
        save(path, 1.0)
    assert all((path / name).read_text() == "precious" for name in names)
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_not_replaced(tmp_path):
    (tmp_path / "one.ckpt").write_text("of another strategy")
    with pytest.raises(ValueError, match=r"one\.ckpt is a file, which a folder cannot replace"):
        save(tmp_path / "one.ckpt", 1.0)
    assert (tmp_path / "one.ckpt").read_text() == "of another strategy"


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["meta.pt", ".metadata", "__0_0.distcp", "__10_0.distcp"],  # of an older version
        ["manifest.json", "meta.pt"],  # damaged
    ],
)
def test_an_empty_folder_and_an_older_or_damaged_checkpoint_are_replaced(names, tmp_path):
    path = tmp_path / "mine"
    path.mkdir()
    for name in names:
        (path / name).write_text("")
    save(path, 1.0)
    assert load(path) == 1.0


def test_exports_and_checkpoints_do_not_replace_each_other(tmp_path):
    for one, other in (
        (manifest.EXPORT, manifest.CHECKPOINT),
        (manifest.CHECKPOINT, manifest.EXPORT),
    ):
        path = tmp_path / one.split()[1]
        atomic_folders.finish(write(path, "one", one))
        with pytest.raises(ValueError, match=f"is not a {other}"):
            atomic_folders.begin(path, other)
        atomic_folders.finish(write(path, "two", one))
        assert text(path) == "two"
