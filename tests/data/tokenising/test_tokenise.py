"""The result knows neither the number of processes nor the moments at which a run was ended."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import Timeout
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.data.stores import arrow_and_parquet
from lightning_wlb.data.tokenising import sources
from lightning_wlb.data.tokenising import tokenise as job
from lightning_wlb.data.tokenising.tokenise import TokeniseRequest, tokenise
from tests.data.tokenising.support import (
    columns,
    contents,
    exchange,
    saved,
    tokenizer,
    write_lines,
)

TEXTS = [f"{number} foxes " + "jump " * (number % 37) for number in range(300)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(sources, "_LEAST_SHARD_BYTES", 2000)
    monkeypatch.setattr(job, "_BATCH_ROWS", 10)


@pytest.fixture
def request_(tmp_path) -> TokeniseRequest:
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in [*TEXTS, "", " "]])
    return TokeniseRequest(path, saved(tmp_path), eos="</s>")


@pytest.fixture
def unbroken(request_, tmp_path) -> Path:
    tokenise(request_, tmp_path / "unbroken", workers=1)
    return tmp_path / "unbroken"


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


def test_what_a_killed_process_of_the_same_number_left_is_no_obstacle(request_, tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("shard-00000.part", "lightning_wlb.partial.json", "lightning_wlb.json"):
        (out / f".{name}.{os.getpid()}.aside").write_text("half")
    assert tokenise(request_, out, workers=1)["documents"] == 300


def _lives(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("whole", [True, False])
def test_another_request_is_refused_with_what_differs(request_, unbroken, whole) -> None:
    if not whole:
        content = json.loads((unbroken / "lightning_wlb.json").read_text())
        partial = {"request": content["request"], "done": {"0": content["done"]["0"]}}
        (unbroken / "lightning_wlb.partial.json").write_text(json.dumps(partial))
        (unbroken / "lightning_wlb.json").unlink()
    how = "was made" if whole else "was begun"
    other = TokeniseRequest(request_.source, request_.tokenizer, eos=False)
    with pytest.raises(ValueError, match=rf"{how} for .* eos '</s>' there, False here; .*rm -r "):
        tokenise(other, unbroken)
    with Path(request_.source).open("a") as file:
        file.write('{"text": "more"}\n')
    changed = TokeniseRequest(request_.source, request_.tokenizer, eos="</s>")
    with pytest.raises(ValueError, match=rf"{how} for another request: bytes \d+ there, \d+ here"):
        tokenise(changed, unbroken)


@pytest.mark.parametrize("whole", [True, False])
def test_files_of_the_same_size_and_time_are_compared_by_their_bytes(
    request_, unbroken, whole, monkeypatch
) -> None:
    made = contents(unbroken)
    if not whole:
        _halve(unbroken)
    Path(request_.source).chmod(0o600)  # changes no bytes, but the time of change of status
    read: list[Any] = []
    shard = job._tokenise_shard
    monkeypatch.setattr(job, "_tokenise_shard", lambda *given: read.append(given) or shard(*given))
    again = TokeniseRequest(request_.source, request_.tokenizer, eos="</s>")
    tokenise(again, unbroken, workers=1)
    assert len(read) == (0 if whole else 1)
    assert {name: made[name] for name in made if name.endswith("arrow")} == {
        name: each for name, each in contents(unbroken).items() if name.endswith("arrow")
    }
    exchange(request_.source, b"7 foxes", b"7 boxes")
    changed = TokeniseRequest(request_.source, request_.tokenizer, eos="</s>")
    with pytest.raises(ValueError, match=r"was made for another request: files_digest"):
        tokenise(changed, unbroken)


def _halve(folder: Path) -> dict[str, Any]:
    """Make a whole folder one that was ended before its shard 1 was done; what its record says."""
    content = json.loads((folder / "lightning_wlb.json").read_text())
    (folder / "lightning_wlb.json").unlink()
    for place, number in enumerate(content["done"]):
        (data,) = folder.glob(f"data-{place:05d}-of-*")
        data.rename(folder / f"shard-{int(number):05d}.part")
    content["done"].pop("1")
    partial = {"request": content["request"], "done": content["done"]}
    (folder / "lightning_wlb.partial.json").write_text(json.dumps(partial))
    return partial


@pytest.mark.parametrize(
    "damage",
    ["token", "documents", "longer", "gone", "link", "fifo", "folder", "no checksum", "empty"],
)
def test_a_shard_that_is_not_as_it_was_written_is_tokenised_again(
    damage, request_, unbroken, tmp_path
) -> None:
    expected, partial = contents(unbroken), _halve(unbroken)
    part = unbroken / "shard-00002.part"
    content, other = part.read_bytes(), (unbroken / "shard-00003.part").read_bytes()
    token = np.array(tokenizer().encode("foxes").ids[:1], "<i4").tobytes()
    assert token in content
    if damage == "no checksum":
        for counts in partial["done"].values():
            del counts["written"]
        (unbroken / "lightning_wlb.partial.json").write_text(json.dumps(partial))
    elif damage in ("token", "documents", "longer"):
        changed = content.replace(token, b"\7\0\0\0", 1), other, content + b"\0"
        part.write_bytes(changed[("token", "documents", "longer").index(damage)])
    else:
        part.rename(tmp_path / "moved")
        make = {"link": lambda path: path.symlink_to(tmp_path / "moved"), "fifo": os.mkfifo}
        make |= {"folder": Path.mkdir, "empty": Path.touch}
        make.get(damage, lambda path: None)(part)
    again = len(partial["done"]) if damage == "no checksum" else 1
    with pytest.warns(
        UserWarning, match=rf": {again} of .* shards .*, such as .* are tokenised again"
    ):
        tokenise(request_, unbroken, workers=1)
    assert contents(unbroken) == expected
    assert not (tmp_path / "moved").exists() or (tmp_path / "moved").read_bytes() == content


@pytest.mark.parametrize("damaged", [True, False])
def test_shards_with_their_final_names_are_compared_too(damaged, request_, unbroken) -> None:
    expected = contents(unbroken)
    content = json.loads(expected["lightning_wlb.json"])
    partial = {"request": content["request"], "done": content["done"]}
    (unbroken / "lightning_wlb.partial.json").write_text(json.dumps(partial))
    (unbroken / "lightning_wlb.json").unlink()
    first, *_, last = sorted(unbroken.glob("data-*"))
    first.rename(unbroken / "shard-00000.part")
    if damaged:
        last.write_bytes(last.read_bytes()[:-8] + bytes(8))
    with warnings.catch_warnings(record=True) as said:
        tokenise(request_, unbroken, workers=1)
    assert len(said) == damaged
    assert contents(unbroken) == expected


def test_a_record_that_counts_other_documents_than_there_are_is_refused(request_, unbroken) -> None:
    partial = _halve(unbroken)
    partial["done"]["0"]["documents"] += 1
    (unbroken / "lightning_wlb.partial.json").write_text(json.dumps(partial))
    with pytest.raises(ValueError, match=r"hold 300 documents, and .* says 301.*rm -r"):
        tokenise(request_, unbroken, workers=1)


@pytest.mark.parametrize(
    "done",
    [
        [1],
        None,
        {"x": {"documents": 20, "targets": 40, "skipped": 0}},
        {" 0": {"documents": 20, "targets": 40, "skipped": 0}},
        {"0": [1]},
        {"0": {"documents": 20}},
        {"0": {"documents": "20", "targets": 40, "skipped": 0}},
    ],
)
def test_a_record_whose_counts_are_none_is_refused(done, request_, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    partial = {"request": request_.identity(), "done": done}
    (tmp_path / "out" / "lightning_wlb.partial.json").write_text(json.dumps(partial))
    with pytest.raises(
        ValueError, match=r"out/lightning_wlb.partial.json is damaged.* rm -r .*out"
    ):
        tokenise(request_, tmp_path / "out", workers=1)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [("c.txt", "c.jsonl", False), ("c.jsonl", "c.txt", False), ("c.txt", "d.md", True)],
)
def test_a_file_that_is_read_another_way_is_another(before, after, same, tmp_path) -> None:
    (tmp_path / "texts").mkdir()
    write_lines(tmp_path / "texts" / before, [{"text": "a"}, {"text": "b"}])
    request = TokeniseRequest(tmp_path / "texts", saved(tmp_path))
    made = tokenise(request, tmp_path / "out", workers=1)
    (tmp_path / "texts" / before).rename(tmp_path / "texts" / after)
    again = TokeniseRequest(tmp_path / "texts", saved(tmp_path))
    if same:
        assert tokenise(again, tmp_path / "out", workers=1) == made
        return
    with pytest.raises(ValueError, match="was made for another request: files_digest"):
        tokenise(again, tmp_path / "out", workers=1)


@pytest.mark.parametrize("name", ["lightning_wlb.json", "lightning_wlb.partial.json"])
@pytest.mark.parametrize("said", [{"documents": 1}, {"request": [1]}])
def test_a_folder_that_does_not_say_for_what_it_was_made_is_refused(name, said, request_, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"for another request: kind None there, 'texts' here"):
        tokenise(request_, tmp_path / "out")


def test_folders_with_something_else_are_left_alone(request_, tmp_path) -> None:
    with pytest.raises(ValueError, match="holds something else"):
        tokenise(request_, tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        tokenise(request_, Path(request_.source))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_another_users_folder_is_not_gone_on_with_where_everybody_may_write(
    request_, unbroken
) -> None:
    os.chown(unbroken, 65534, 65534)
    assert tokenise(request_, unbroken)["documents"] == 300, "a group's"
    unbroken.parent.chmod(0o1777)
    with pytest.raises(ValueError, match="belongs to user 65534, and this process to user 0"):
        tokenise(request_, unbroken)
    os.chown(unbroken, 0, 0)
    link = unbroken.with_name("link")
    link.symlink_to(unbroken)
    assert tokenise(request_, link)["documents"] == 300
    os.lchown(link, 65534, 65534)
    with pytest.raises(ValueError, match="link belongs to user 65534"):
        tokenise(request_, link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_another_users_folder_that_comes_late_is_not_taken_either(
    request_, unbroken, tmp_path, monkeypatch
) -> None:
    os.chown(unbroken, 65534, 65534)
    shared, identity = tmp_path / "shared", TokeniseRequest.identity
    shared.mkdir()
    shared.chmod(0o1777)

    def late(self: TokeniseRequest) -> dict[str, object]:
        unbroken.rename(shared / "out")
        return identity(self)

    monkeypatch.setattr(TokeniseRequest, "identity", late)
    with pytest.raises(ValueError, match="belongs to user 65534, and this process to user 0"):
        tokenise(request_, shared / "out")


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
    with pytest.raises(ValueError, match="a mistake"):
        tokenise(request_, tmp_path / "out", 2)
    assert not multiprocessing.active_children()


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
    with pytest.raises(ValueError, match=r"unpacks to [\d,]+ bytes, and .* are 99 left"):
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
            patch.setattr(job, "FileLock", lambda path: _Writing(beaten, begun))
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
