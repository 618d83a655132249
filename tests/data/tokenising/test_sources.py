"""Every row of a source is in exactly one shard, with its place."""

import gzip
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.data.tokenising import sources
from lightning_wlb.data.tokenising.sources import Source, rows

LINES = st.lists(st.sampled_from(["", " ", "a", "ü", "long " * 9]), max_size=9)


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("source")


@given(st.data(), st.integers(1, 60), st.booleans())
def test_every_row_is_in_one_shard_in_order(tmp_path_factory, data, least, ends) -> None:
    folder, texts = tmp_path_factory.mktemp("source"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_LEAST_SHARD_BYTES", least)
        for number in range(data.draw(st.integers(1, 3))):
            lines = data.draw(LINES)
            texts += lines
            written = "\n\n".join(json.dumps({"text": line}) for line in lines)
            content = (written + ("\n" if ends else "")).encode()
            if data.draw(st.booleans()):
                (folder / f"{number}.jsonl").write_bytes(content)
            else:
                (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(content))
        shards = Source.open(folder).shards()
    parts = [part for shard in shards for part in shard]
    read = [row for part in parts for row in rows(part)]
    assert [row.record["text"] for row in read] == texts
    assert sum(part.stop - part.start for part in parts) == sum(Source.open(folder).sizes)
    for row in read:
        name, _, line = row.place().rpartition(":")
        opened = gzip.open if name.endswith(".gz") else open
        with opened(name, "rt") as file:
            assert json.loads(file.read().split("\n")[int(line) - 1]) == row.record


def test_shards_depend_on_sizes_alone_and_are_bounded(folder, monkeypatch) -> None:
    (folder / "a.jsonl").write_text('{"text": 1}\n' * 100)
    (folder / "b.jsonl").write_text('{"text": 1}\n')
    monkeypatch.setattr(sources, "_LEAST_SHARD_BYTES", 500)
    source = Source.open(folder)
    assert [[part[1:] for part in shard] for shard in source.shards()] == [
        [(0, 500)],
        [(500, 1000)],
        [(1000, 1200), (0, 12)],
    ]
    monkeypatch.setattr(sources, "_LEAST_SHARD_BYTES", 1)
    monkeypatch.setattr(sources, "_MOST_SHARDS", 2)
    assert [len(shard) for shard in source.shards()] == [1, 2]


def test_text_files_are_a_document_each_and_hidden_ones_none(folder) -> None:
    (folder / "b").mkdir()
    (folder / "b" / "2.md").write_text("two")
    (folder / "a.txt").write_bytes("\ufeffone".encode())
    (folder / ".hidden.txt").write_text("no")
    (folder / "picture.png").write_text("no")
    source = Source.open(folder)
    read = [row for shard in source.shards() for part in shard for row in rows(part)]
    assert [(row.record, row.place()) for row in read] == [
        ({"text": "one"}, str(folder / "a.txt")),
        ({"text": "two"}, str(folder / "b" / "2.md")),
    ]
    assert source.left_out == ("picture.png",)


def test_empty_texts_are_rows_too(folder) -> None:
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("")
    (shard,) = Source.open(folder).shards()
    assert [row.record for part in shard for row in rows(part)] == [{"text": ""}] * 2


def test_copies_and_several_splits_are_refused(folder) -> None:
    line = b'{"text": "a"}\n'
    (folder / "a.jsonl").write_bytes(line)
    for name in ("a.jsonl.gz", "a (1).jsonl", "a copy.jsonl", "a (2).jsonl.gz", "a - Copy.jsonl"):
        (folder / name).write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
        with pytest.raises(ValueError, match=f"{re.escape(name)} and its copy beside it, a.jsonl"):
            Source.open(folder)
        (folder / name).rename(folder / "b (1).jsonl")  # which is beside no b.jsonl
        assert len(Source.open(folder).files) == 2
    (folder / "b (1).jsonl").unlink()
    (folder / "a.jsonl").rename(folder / "wiki.train.jsonl")
    for name in ("test.jsonl", "valid-0.jsonl", "Validation.jsonl", "dev/0.jsonl", "x_eval.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(line)
        with pytest.raises(ValueError, match=f"several splits, such as .*train.* and .*{name}"):
            Source.open(folder)
        (folder / name).unlink()
    for name in ("training.jsonl", "more.jsonl", "testimony.jsonl"):  # and no split is said of all
        (folder / name).write_bytes(line)
        Source.open(folder)
    (folder / "test.jsonl").write_bytes(line)
    assert len(Source.open(folder).files) == 5


def test_shards_of_two_writings_are_refused(folder) -> None:
    names = ["c-00000-of-00001.jsonl", "c-00000-of-00002.jsonl", "c-00001-of-00002.jsonl.gz"]
    for name in (*names, "d-0-of-1.jsonl", "e-1-of-2.txt", "e-1-of-3.txt"):
        (folder / name).touch()
    said = f"{folder}/c-*-of-00001.jsonl and {folder}/c-*-of-00002.jsonl are two writings, whose"
    with pytest.raises(ValueError, match=re.escape(said)):
        Source.open(folder)
    (folder / names[0]).unlink()
    assert [each.name for each in Source.open(folder).files] == [*names[1:], "d-0-of-1.jsonl"]
    for path in folder.glob("*.jsonl*"):
        path.unlink()
    assert len(Source.open(folder).files) == 2


def test_links_are_followed_and_nothing_comes_twice(folder, tmp_path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "b.txt").write_text("b")
    (folder / "a.txt").write_text("a")
    (folder / "link").symlink_to(tmp_path / "far")
    assert [path.name for path in Source.open(folder).files] == ["a.txt", "b.txt"]
    for to in (folder, tmp_path / "far", folder / "a.txt", tmp_path / "far" / "b.txt"):
        (folder / "z.txt").symlink_to(to)
        with pytest.raises(ValueError, match="are the same by a link, or named twice"):
            Source.open(folder)
        (folder / "z.txt").unlink()
    (folder / "z.txt").symlink_to(folder / "nowhere")
    with pytest.raises(ValueError, match=r"z\.txt is a link that leads to nothing"):
        Source.open(folder)


def test_a_folder_that_cannot_be_looked_into_is_not_left_out(folder, monkeypatch) -> None:
    (folder / "closed").mkdir()
    (folder / "a.txt").write_text("a")
    list_folder = os.scandir

    def closed(path):
        if Path(path).name in ("closed", "lost+found"):
            raise PermissionError(13, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", closed)
    (folder / "closed").rename(folder / "lost+found")
    assert len(Source.open(folder).files) == 1
    (folder / "lost+found").rename(folder / "closed")
    with pytest.raises(ValueError, match=r"closed cannot be looked into \(Permission denied\)"):
        Source.open(folder)


def test_folders_are_not_looked_into_without_end(folder) -> None:
    """A file's owners are looked up on the whole way to it."""
    deep = folder.joinpath(*"a" * (100 - len(folder.parts) + 1))
    deep.mkdir(parents=True)
    (deep / "a.txt").write_text("a")
    assert len(Source.open(folder).files) == 1
    (deep / "b").mkdir()
    with pytest.raises(ValueError, match=f"^{deep}/b is more than 100 folders deep"):
        Source.open(folder)
    (folder / "0").symlink_to("a/../" * 300)
    with pytest.raises(ValueError, match=f"^{folder}/0 leads through more than 500 folders"):
        Source.open(folder)


def test_json_lines_go_before_texts_beside_them(folder) -> None:
    (folder / "README.md").write_text("about")
    (folder / "a.jsonl").write_text("{}")
    source = Source.open(folder)
    assert [path.name for path in source.files] == ["a.jsonl"]
    assert source.left_out == ("README.md",)


def test_the_digest_changes_with_size_time_and_name(folder) -> None:
    path = folder / "a.jsonl"
    path.write_text("{}")
    digests = [Source.open(folder).identity()["files_digest"]]
    path.write_text("{}\n")
    digests.append(Source.open(folder).identity()["files_digest"])
    os.utime(path, ns=(1, 1))
    digests.append(Source.open(folder).identity()["files_digest"])
    path.rename(folder / "b.jsonl")
    digests.append(Source.open(folder).identity()["files_digest"])
    assert len(set(digests)) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', r"a.jsonl:2 is no JSON: Expecting value at character"),
        (b"\n\n[1]\n", r"a.jsonl:3 holds a list, but each line is one JSON object"),
        (b'{"a": "\xff"}', r"a.jsonl:1 is no UTF-8 from byte 7 "),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', r"a.jsonl:1: an object has the name 'b' twice"),
        (b'\n{"a": ' + b"9" * 5000 + b"}", r"a.jsonl:2: Exceeds the limit .*remove the line"),
        (b'{"a": ' + b"[" * 100_000, r"a.jsonl:1: maximum recursion depth .*remove the line"),
    ],
)
def test_lines_that_cannot_be_read_are_named(folder, content, message) -> None:
    (folder / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(rows(Source.open(folder).shards()[0][0]))


def test_a_line_without_end_is_not_unpacked(folder, monkeypatch) -> None:
    monkeypatch.setattr(sources, "MOST_BYTES", 1000)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' + b" " * 1001))
    parts = Source.open(folder).shards()[0]
    with pytest.raises(ValueError, match=r"a.jsonl.gz:2 has more than 1,000 bytes, and a line is"):
        list(rows(parts[0]))


def test_a_few_packed_bytes_do_not_stand_for_gigabytes_of_values(folder) -> None:
    packed = gzip.compress(b'{"a": [' + b"{}," * 6_000_000 + b"{}]}")
    (folder / "a.jsonl.gz").write_bytes(packed)
    assert len(packed) < 20_000
    (part,) = Source.open(folder).shards()[0]
    with pytest.raises(ValueError, match=r"has more than 16,777,216 bytes, and a line is"):
        list(rows(part))


@pytest.mark.timeout(60)  # one after another they would take an hour
def test_blank_lines_alone_are_not_unpacked_for_ever(folder) -> None:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' + b" \n" * 9_000_000))
    (source,) = (part for shard in Source.open(folder).shards() for part in shard)
    with pytest.raises(ValueError, match=r"a.jsonl.gz has 16,777,2\d\d bytes of blank lines"):
        list(rows(source))


def test_the_second_of_many_names_is_found_at_once(folder) -> None:
    names = ",".join(f'"{each}": 0' for each in (*range(500_000), 499_999))
    (folder / "a.jsonl").write_text(f"{{{names}}}")
    with pytest.raises(ValueError, match="an object has the name '499999' twice"):
        list(rows(Source.open(folder).shards()[0][0]))


def test_a_damaged_archive_is_named(folder) -> None:
    whole = gzip.compress(b'{"a": 1}\n' * 100)
    (folder / "a.jsonl.gz").write_bytes(whole)
    part = Source.open(folder).shards()[0][0]
    for damaged in (whole[:-9], whole[:12] + b"\xff" * 9 + whole[21:], b"no archive"):
        (folder / "a.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a.jsonl.gz cannot be unpacked: .*Compress it again"):
            list(rows(part))


def test_what_is_no_source_is_answered(folder) -> None:
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        Source.open(folder / "missing")
    with pytest.raises(ValueError, match="holds 0 files and none that can be read"):
        Source.open(folder)
    (folder / "a.csv").write_text("")
    with pytest.raises(ValueError, match=r"a.csv is not a source of texts"):
        Source.open(folder / "a.csv")
    (folder / "a.txt").write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"a.txt: byte 1 is no UTF-8"):
        list(rows(Source.open(folder / "a.txt").shards()[0][0]))
