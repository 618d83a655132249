"""The result knows neither the number of processes nor the moments at which a run was ended."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from filelock import Timeout
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.data.stores import arrow_and_parquet
from lightning_wlb.data.tokenising import tokenise as job
from lightning_wlb.data.tokenising.tokenise import TokeniseRequest, tokenise
from tests.data.tokenising.support import (
    TEXTS,
    columns,
    contents,
    exchange,
    saved,
    tokenizer,
    write_lines,
)

pytestmark = pytest.mark.usefixtures("small_shards")


def test_the_folder_holds_the_tokenizers_tokens_and_figures(request_, unbroken) -> None:
    expected = [[*tokenizer().encode(text).ids, 1] for text in TEXTS]
    assert columns(unbroken) == {"input_ids": expected}
    made = json.loads((unbroken / "lightning_wlb.json").read_text())
    lengths = [len(tokens) for tokens in expected]
    assert made["documents"] == 300
    assert made["skipped"] == 2
    assert made["tokens"] == made["targets"] == sum(lengths)
    assert made["longest"] == max(lengths)
    assert made["vocab_size"] == 300
    assert made["format"] == 2
    for number, counts in enumerate(made["by_length"]):
        here = [length for length in lengths if 1 << number <= length < 2 << number]
        assert counts == [len(here), sum(here)]
    assert len(list(unbroken.glob("data-*.arrow"))) == len(request_.files.shards()) > 5
    assert not (unbroken / "lightning_wlb.partial.json").exists()
    assert not list(unbroken.glob(".*"))


def test_workers_do_not_change_the_result(request_, unbroken, tmp_path) -> None:
    out = tmp_path / "parallel"
    made = tokenise(request_, out, workers=3)
    assert contents(out) == contents(unbroken)
    assert made == json.loads((out / "lightning_wlb.json").read_text())


def _run_until(request: TokeniseRequest, out: Path, renames: int) -> None:
    """In a process of its own: end without any tidying up before a file takes its name."""
    replace, left = Path.replace, iter(range(renames))

    def counted(self: Path, target: Path) -> Path:
        if next(left, None) is None:
            os._exit(9)
        return replace(self, target)

    Path.replace = counted  # type: ignore[method-assign]
    tokenise(request, out, workers=1)


def test_a_run_that_is_ended_anywhere_goes_on(request_, unbroken, tmp_path) -> None:
    out, expected = tmp_path / "broken", contents(unbroken)

    @settings(max_examples=8)
    @given(st.lists(st.integers(0, 45), min_size=1, max_size=3))
    def check(renames: list[int]) -> None:
        shutil.rmtree(out, ignore_errors=True)
        for count in renames:
            process = multiprocessing.get_context("fork").Process(
                target=_run_until, args=(request_, out, count)
            )
            process.start()
            process.join(60)
            assert process.exitcode in (0, 9)
            assert (out / "lightning_wlb.json").exists() or process.exitcode == 9
        tokenise(request_, out, workers=1)
        assert contents(out) == expected

    check()


def test_killed_workers_leave_nobody_behind_and_the_run_goes_on(
    request_, unbroken, tmp_path, monkeypatch
) -> None:
    out = tmp_path / "killed"
    shard = job._tokenise_shard

    def slow(*arguments):
        (tmp_path / f"worker-{os.getpid()}").touch()
        time.sleep(0.05)
        return shard(*arguments)

    monkeypatch.setattr(job, "_tokenise_shard", slow)
    process = multiprocessing.get_context("fork").Process(target=tokenise, args=(request_, out, 2))
    process.start()
    deadline = time.monotonic() + 60
    while not list(out.glob("shard-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert (out / "lightning_wlb.partial.json").exists()
    assert not (out / "lightning_wlb.json").exists()
    for number in (int(path.name.split("-")[1]) for path in tmp_path.glob("worker-*")):
        while time.monotonic() < deadline and _lives(number):
            time.sleep(0.01)
        assert not _lives(number)
    monkeypatch.setattr(job, "_tokenise_shard", shard)
    tokenise(request_, out, 2)
    assert contents(out) == contents(unbroken)


def test_what_a_killed_process_left_is_no_obstacle_and_goes(request_, tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("shard-00000.part", "lightning_wlb.partial.json", "lightning_wlb.json"):
        (out / f".{name}.0123456789abcdef.aside").write_text("half")
    assert tokenise(request_, out, workers=1)["documents"] == 300
    assert not list(out.glob(".*"))


def _lives(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_ends_the_run_by_its_place(tmp_path, workers) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    lines = path.read_text().splitlines()
    lines[222] = '{"text": '
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"a.jsonl:223 is no JSON"):
        tokenise(TokeniseRequest(path, saved(tmp_path)), tmp_path / "out", workers)


def test_a_mistake_does_not_wait_for_shards_under_way(request_, tmp_path, monkeypatch) -> None:
    ours = {str(part) for part in request_.files.shards()[0]}

    def work(parts, *rest):
        if {str(part) for part in parts} == ours:
            raise ValueError("a mistake")
        time.sleep(600)  # longer than pytest waits

    monkeypatch.setattr(job, "_tokenise_shard", work)
    before = {*multiprocessing.active_children()}  # loader workers that an earlier test has left
    with pytest.raises(ValueError, match="a mistake"):
        tokenise(request_, tmp_path / "out", 2)
    assert {*multiprocessing.active_children()} <= before


def test_a_worker_that_dies_is_reported(request_, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(job, "_tokenise_shard", lambda *given: os._exit(1))
    with pytest.raises(ValueError, match=r"A worker process died.* try fewer workers"):
        tokenise(request_, tmp_path / "out", 2)


@pytest.mark.parametrize("workers", [0, 1.5])
def test_workers_are_a_whole_number(request_, tmp_path, workers) -> None:
    with pytest.raises(ValueError, match=f"workers={workers}"):
        tokenise(request_, tmp_path / "out", workers)


def test_a_source_without_documents_and_one_that_changes_are_refused(
    request_, tmp_path, monkeypatch
) -> None:
    path = write_lines(tmp_path / "empty.jsonl", [{"text": ""}])
    with pytest.raises(ValueError, match="holds no documents: 1 rows"):
        tokenise(TokeniseRequest(path, request_.tokenizer), tmp_path / "out")
    shard = job._tokenise_shard

    def growing(*arguments):
        with Path(request_.source).open("a") as file:
            file.write("\n")
        return shard(*arguments)

    monkeypatch.setattr(job, "_tokenise_shard", growing)
    with pytest.raises(ValueError, match="has changed while it was read"):
        tokenise(request_, tmp_path / "changed", workers=1)


def test_documents_that_the_disk_has_no_room_for_are_refused(request_, tmp_path, monkeypatch):
    """Few bytes of gzip may stand for any number of lines."""
    usage = shutil.disk_usage(tmp_path)._replace(free=99)
    monkeypatch.setattr(arrow_and_parquet.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=r"unpacks to [\d,]+ bytes, but .* has 99 left"):
        tokenise(request_, tmp_path / "out", workers=1)


def test_a_disk_that_fills_up_is_named(request_, tmp_path, monkeypatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: \S+/out/lightning_wlb\.partial"):
        tokenise(request_, tmp_path / "out", workers=1)


def test_a_source_that_is_touched_while_it_is_read_is_told_from_one_that_changes(
    request_, tmp_path, monkeypatch
) -> None:
    shard, source = job._tokenise_shard, Path(request_.source)

    def touching(*arguments):
        source.chmod(0o600)
        return shard(*arguments)

    def changing(*arguments):
        try:
            return shard(*arguments)
        finally:
            exchange(source, b" foxes", b" boxes") if b" foxes" in source.read_bytes() else None

    monkeypatch.setattr(job, "_tokenise_shard", touching)
    assert tokenise(request_, tmp_path / "touched", workers=1)["documents"] == 300
    monkeypatch.setattr(job, "_tokenise_shard", changing)
    with pytest.raises(ValueError, match="has changed while it was read"):
        tokenise(request_, tmp_path / "changed", workers=1)


def test_a_folder_that_another_has_and_does_not_work_on_is_given_up(
    request_, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(job, "_LOOK_SECONDS", 0.05)
    context = multiprocessing.get_context("fork")
    stalled = tmp_path / "stalled"
    stalled.mkdir()
    monkeypatch.setattr(job, "_STALLED_SECONDS", 0.2)
    with job._alone(stalled):
        # As long as it writes, as one shard of a compressed file, it is waited for.
        begun, beaten = time.monotonic(), stalled / ".shard-00000.part.1.aside"
        with monkeypatch.context() as patch:
            patch.setattr(job, "FileLock", lambda path, mode: _Writing(beaten, begun))
            with pytest.raises(TimeoutError, match="another writes"):
                job._alone(stalled).__enter__()
        waiting = context.Process(target=_expect_stalled, args=(request_, stalled))
        waiting.start()
        waiting.join(60)
    assert waiting.exitcode == 0


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("a"), Path.mkdir, os.mkfifo])
def test_what_is_no_lock_is_to_be_removed(make, request_, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out" / job.LOCK)
    with pytest.raises(ValueError, match=r"is no file, and .* Remove it: rm -r .*_wlb\.lock"):
        tokenise(request_, tmp_path / "out")


class _Writing:
    """A lock whose holder goes on writing for longer than it may be silent."""

    def __init__(self, file: Path, begun: float) -> None:
        self.file, self.begun = file, begun

    def acquire(self, timeout: float) -> None:
        with self.file.open("a") as file:
            file.write("more")
        time.sleep(0.02)
        if time.monotonic() - self.begun > 0.6:
            raise TimeoutError("another writes")
        raise Timeout(str(self.file))


def _expect_stalled(request: TokeniseRequest, out: Path) -> None:
    with pytest.raises(TimeoutError, match="has written nothing there"):
        tokenise(request, out, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "lists"}, "kind='lists' is not one of texts, chats"),
        ({"kind": "chats", "eos": False}, "eos=False for chats"),
        ({"column": "body"}, "holds text files, which have neither chats nor columns"),
        ({"kind": "chats"}, "holds text files, which have neither chats nor columns"),
        ({"eos": 2}, "eos=2 is of type int"),
    ],
)
def test_requests_that_do_not_go_together_are_refused(tmp_path, options, message) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=message):
        TokeniseRequest(tmp_path / "a.txt", "tokenizer.json", **options)
