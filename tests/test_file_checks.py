"""What may be read as a file: each reader refuses what would hang it, with a sentence."""

import grp
import json
import os
import pwd
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_wlb import file_checks
from lightning_wlb.checkpoints import manifest, safe_metadata
from lightning_wlb.checkpoints.pickle_checks import load_plain
from lightning_wlb.cli.shared_options import _lengths_in_file, load_lengths
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.open_documents import documents
from lightning_wlb.data.stores import megatron
from lightning_wlb.data.stores.arrow_and_parquet import ArrowDocuments, ParquetDocuments
from lightning_wlb.data.tokenising.sources import Part, rows
from lightning_wlb.data.tokenising.texts import TextEncoder
from lightning_wlb.models.huggingface.config_and_shape import read_config
from lightning_wlb.models.huggingface.safetensors_folder import Folder
from tests.checkpoints.small_checkpoints import list_anew, save

pytestmark = pytest.mark.timeout(60)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


READERS: dict[str, Callable[[Path], Any]] = {
    "manifest.json": lambda path: manifest.read(path.parent),
    "meta.pt": load_plain,
    ".metadata": lambda path: safe_metadata.read(path.parent),
    "profile.json": Profile.load,
    "a.idx": megatron.MegatronDocuments,
    "a.bin": lambda path: megatron._mapped(path, "uint16"),
    "a.parquet": ParquetDocuments,
    "a.arrow": ArrowDocuments,
    "state.json": lambda path: ArrowDocuments(path.parent),
    "lengths.txt": _lengths_in_file,
    "lengths.npy": _lengths_in_file,
    "a.jsonl": lambda path: list(rows(Part(path, 0, 1))),
    "a.jsonl.gz": lambda path: list(rows(Part(path, 0, 1))),
    "a.txt": lambda path: list(rows(Part(path, 0, 1))),
    "tokenizer.json": lambda path: TextEncoder(str(path.parent), "text"),
    "tokenizer_config.json": lambda path: TextEncoder(str(path.parent), "text"),
    "config.json": lambda path: read_config(path.parent),
    "model.safetensors": lambda path: Folder(path.parent),
}


@pytest.mark.parametrize("make", [fifo, endless], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_what_never_ends(name: str, make: Any, tmp_path: Path) -> None:
    make(tmp_path / name)
    (tmp_path / "tokenizer_config.json").touch()  # so that a folder is one of transformers
    with pytest.raises(ValueError, match=r"is a (FIFO|device)\. Put a regular file there"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", READERS)
def test_nor_what_only_says_that_it_is_empty(name: str, tmp_path: Path) -> None:
    """``/proc/self/pagemap`` says so, too, and is as long as the memory of a process can be."""
    (tmp_path / name).symlink_to("/proc/self/status")
    (tmp_path / "tokenizer_config.json").touch()
    with pytest.raises(ValueError, match=r"says that it has no bytes, but more come"):
        READERS[name](tmp_path / name)
    (tmp_path / "empty").touch()
    assert file_checks.check_regular(tmp_path / "empty") == 0


def test_nor_what_has_no_bytes_yet(tmp_path: Path, monkeypatch: Any) -> None:
    """As ``/proc/kmsg`` between two messages, where a read that does not wait gives None."""
    (tmp_path / "empty").touch()
    waiting, opened = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setattr(file_checks.os, "open", lambda *args: waiting)
    with pytest.raises(ValueError, match=r"says that it has no bytes, but more come"):
        file_checks.check_regular(tmp_path / "empty")
    os.close(opened)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt"])
def test_nor_does_a_listed_file_of_a_checkpoint_hang(name: str, tmp_path: Path) -> None:
    """Its manifest says that there are no bytes in it, and a FIFO has none."""
    folder = tmp_path / "run.ckpt"
    save(folder, 1.0)
    (folder / name).write_bytes(b"")
    list_anew(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(manifest.Damaged, match=f"{name} .*is a FIFO"):
        manifest.check(folder)


def test_links_to_a_users_own_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    assert [row.record for row in rows(Part(tmp_path / "link.jsonl", 0, 5))] == [{"text": "a"}]
    with pytest.raises(ValueError, match=r"is a link\. Put a regular file there"):
        file_checks.check_regular(tmp_path / "link.jsonl", links=False)
    with pytest.raises(FileNotFoundError):
        file_checks.open_regular(tmp_path / "none")


def test_what_is_no_file_is_called_by_its_name(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "socket"))
        for path, name in ((tmp_path, "folder"), (Path("/dev/null"), "device")):
            with pytest.raises(ValueError, match=rf"{path} is a {name}\. Put a regular"):
                file_checks.open_regular(path)
        with pytest.raises(ValueError, match="is a socket"):
            file_checks.check_regular(tmp_path / "socket")


def test_no_more_than_so_many_bytes_are_read(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert file_checks.read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="has 5 bytes, and no more than 4 are read"):
        file_checks.read_bytes(tmp_path / "a", 4)
    # A file that grows while it is read, as those of /proc seem to.
    monkeypatch.setattr(file_checks, "_checked", lambda status, path, most: 1)
    with pytest.raises(ValueError, match="has 5 bytes, and no more than 4 are read"):
        file_checks.read_bytes(tmp_path / "a", 4)


@pytest.mark.parametrize(
    "read",
    [
        lambda path: manifest.read(path.parent),
        Profile.load,
        lambda path: ArrowDocuments(path.parent),
        lambda path: read_config(path.parent),
    ],
)
def test_brackets_without_end_are_a_sentence(read: Any, tmp_path: Path) -> None:
    for name in ("manifest.json", "state.json", "config.json"):
        (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"nested too deeply|recursion depth"):
        read(tmp_path / "manifest.json")


def test_lengths_of_a_size_that_is_claimed_are_not_made_room_for(tmp_path: Path) -> None:
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (9999999999999,)}\n"
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    (tmp_path / "a.npy").write_bytes(start + header)
    with pytest.raises(ValueError, match="is not a list of lengths: mmap length is greater"):
        load_lengths(str(tmp_path / "a.npy"), context_window=1, micro_batches=1, steps=1, seed=0)


class TestOwnFolder:
    @staticmethod
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    def test_it_is_made_for_this_user_alone(self, tmp_path: Path) -> None:
        umask = os.umask(0o002)
        try:
            made = file_checks.own_folder(tmp_path / "a" / "b")
        finally:
            os.umask(umask)
        assert made.is_dir()
        assert self.mode(made) == self.mode(made.parent) == 0o700

    def test_what_others_may_do_in_it_is_taken_back(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        assert self.mode(file_checks.own_folder(tmp_path)) == 0o700

    @pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
    def test_what_others_could_put_there_is_not_believed(self, mode: int, tmp_path: Path) -> None:
        (tmp_path / "theirs").touch()
        tmp_path.chmod(0o755)
        assert self.mode(file_checks.own_folder(tmp_path)) == 0o700
        tmp_path.chmod(mode)
        with pytest.raises(ValueError, match="may be written to by others"):
            file_checks.own_folder(tmp_path)

    def test_another_users_is_refused(self, tmp_path, monkeypatch):
        mine = os.geteuid()
        tmp_path.chmod(0o755)
        monkeypatch.setattr(file_checks, "my_user", lambda: mine + 1)
        for check in (file_checks.check_folder, file_checks.own_folder):
            with pytest.raises(ValueError, match=f"user {mine}, (and this process|mode 7)"):
                check(tmp_path)

    def test_a_folder_of_mine_to_which_others_may_write_is_refused(self, tmp_path: Path) -> None:
        assert file_checks.check_folder(tmp_path) == tmp_path
        tmp_path.chmod(0o775)
        with pytest.raises(ValueError, match="may be written to by others"):
            file_checks.check_folder(tmp_path)

    def test_nobody_else_may_rename_in_what_leads_there(self, tmp_path, monkeypatch) -> None:
        mine, path = os.geteuid(), tmp_path / "a/b"
        (tmp_path / "a").mkdir()
        (tmp_path / "link").symlink_to("a")
        # An access list for others shows as the rights of a group, be it the owner's own.
        group = SimpleNamespace(gr_name=pwd.getpwuid(mine).pw_name, gr_mem=[])
        monkeypatch.setattr(grp, "getgrgid", lambda number: group)
        for mode, taken in ((0o757, False), (0o775, False), (0o1777, True), (0o755, True)):
            (tmp_path / "a").chmod(mode)
            if taken:
                assert file_checks.own_folder(tmp_path / "link/b") == path
                path.rmdir()
                continue
            with pytest.raises(
                ValueError, match=f"^Others .*a and exchange {path} .*{mode:o}.*chmod go-w"
            ):
                file_checks.own_folder(tmp_path / "link/b")
            assert not path.exists()

    def test_nothing_takes_its_place(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "link").symlink_to(tmp_path)
        for name, kind in (("fifo", "a FIFO"), ("link", "a link")):
            with pytest.raises(ValueError, match=f"{name} is {kind}, not a folder"):
                file_checks.own_folder(tmp_path / name)


def test_a_folder_names_no_file_outside_of_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out.arrow").touch()
    for name in ("../out.arrow", str(tmp_path / "out.arrow")):
        (tmp_path / "in/state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(ValueError, match="which is not in it"):
            documents(tmp_path / "in")
        weights = {"weight_map": {"a": name}}
        (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps(weights))
        with pytest.raises(ValueError, match="is not in the folder"):
            Folder(tmp_path / "in")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to another user")
def test_root_makes_no_folder_in_the_home_of_a_user(tmp_path: Path) -> None:
    """Else that user has no ``~/.cache`` any more, after one ``sudo`` that keeps HOME."""
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ValueError, match=r"and exchange \S+cache "):
        file_checks.own_folder(tmp_path / ".cache/lightning_wlb")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("linked", ["theirs", "leads"])
def test_a_link_of_ones_own_may_lead_to_a_strangers(linked: str, scratch: Path) -> None:
    """As ``~/ckpts`` to what was purged in ``/scratch``, and which anybody may make again."""
    strange, mine = scratch / linked, scratch.parent / "home"

    def steps(path: Path) -> list[Path]:
        real, found = file_checks.follow(path)
        assert str(real) == os.path.realpath(path)
        return [*found]

    (mine / "far").symlink_to(f"../scratch/{linked}/in")
    (mine / "up").symlink_to(strange / "..")
    for number in range(39):
        (mine / f"link{number}").symlink_to(f"link{number - 1}" if number else "far")
    for path in (strange, mine / "far", mine / "far/deeper/missing", mine / "link38"):
        assert steps(path) == [strange], path
    assert steps(mine / "up") == [strange]
    (mine / "link39").symlink_to("link38")
    (mine / "circle").symlink_to("circle")
    for endless in ("link39", "circle"):  # the kernel does not follow more than 40 either
        assert [*file_checks.follow(mine / endless)[1]] == []
    if linked == "leads":
        said = rf"far leads to {mine}/in by {strange}, a link of user 65534, where others may put"
        with pytest.raises(ValueError, match=said):
            file_checks.check_links(mine / "far")
        with pytest.raises(ValueError, match=f"by {strange}, a link of user 65534"):
            file_checks.own_folder(mine / "far/cache")
        assert not list((mine / "in").iterdir())
    else:
        assert file_checks.check_links(mine / "far") == (mine / "far").resolve()


def test_links_are_not_followed_for_ever(tmp_path: Path) -> None:
    """Forty may lead over 2,000 folders each."""
    (tmp_path / "a").mkdir()
    for number, steps in enumerate((100, 300)):
        (tmp_path / str(number)).symlink_to("a/../" * steps)
    assert file_checks.follow(tmp_path / "0")[0] == tmp_path
    with pytest.raises(ValueError, match=f"{tmp_path}/1/x leads through more than 500 folders"):
        file_checks.follow(tmp_path / "1/x")


def test_a_stranger_s_link_in_a_stranger_s_folder_is_seen(scratch: Path) -> None:
    """That folder is open to nobody else, and led to this user's own checkpoints."""
    (scratch / "theirs/run").symlink_to(scratch.parent / "home")
    os.lchown(scratch / "theirs/run", 65534, 65534)
    steps = [scratch / "theirs", scratch / "theirs/run"]
    assert [*file_checks.follow(scratch / "theirs/run/new")[1]] == steps
    with pytest.raises(ValueError, match=f"by {steps[1]}, a link of user 65534"):
        file_checks.check_links(scratch / "theirs/run/new")


def test_a_link_made_after_the_look_leads_nowhere(scratch: Path, monkeypatch: Any) -> None:
    """In the time between the look at a folder's path and the making of the folder."""
    look, home = file_checks.follow, scratch.parent / "home"

    def looked(path: str | Path) -> Any:
        seen = look(path)
        if not (scratch / "mine").is_symlink():
            (scratch / "mine").symlink_to(home)
            os.lchown(scratch / "mine", 65534, 65534)
        return seen

    monkeypatch.setattr(file_checks, "follow", looked)
    with pytest.raises(ValueError, match=f"^Others may write to {scratch / 'mine'} and exchange"):
        file_checks.own_folder(scratch / "mine/cache/documents")
    assert [each.name for each in home.iterdir()] == ["in"]


def test_ones_own_links_and_roots_are_followed(scratch: Path, monkeypatch: Any) -> None:
    """A home with a link to ``/scratch/USER``, root's links, and one's own in a sticky folder."""
    monkeypatch.setattr(file_checks, "my_user", lambda: 65534)
    home = scratch.parent / "home"
    (scratch / "of root").symlink_to(home)
    (home / "scratch").symlink_to(scratch / "theirs")
    for each in (home, home / "scratch"):
        os.lchown(each, 65534, 65534)
    for path in ("home/scratch/in", "scratch/leads/in", "scratch/of root/scratch/in"):
        assert [*file_checks.follow(scratch.parent / path)[1]] == []
    monkeypatch.setattr(file_checks, "my_user", lambda: 65533)
    assert [*file_checks.follow(home / "scratch/in")[1]] == [scratch / "theirs"]
    os.lchown(scratch / "of root", 65533, 65533)
    assert [*file_checks.follow(scratch / "of root")[1]] == []


def test_users_whom_a_namespace_does_not_have_are_strangers(
    scratch: Path, monkeypatch: Any
) -> None:
    """All of them, and root, who has made ``/``, are the user 65534 there."""
    stat = Path.stat

    def seen(path: Path, **options: Any) -> Any:
        found = stat(path, **options)
        own = SimpleNamespace(st_uid=65534, st_mode=0o40755)
        return own if path == Path("/") else found

    monkeypatch.setattr(Path, "stat", seen)
    assert file_checks.own_folder(scratch.parent / "mine").is_dir()
    with pytest.raises(ValueError, match=f"^Others may write to {scratch / 'theirs'} and"):
        file_checks.own_folder(scratch / "theirs/own")
    assert next(iter(file_checks.follow(scratch / "leads/in")[1])) == scratch / "leads"
    monkeypatch.setattr(file_checks, "my_user", lambda: 65534)
    assert [*file_checks.follow(scratch / "leads/in")[1]] == []
