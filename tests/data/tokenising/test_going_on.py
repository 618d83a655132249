"""Which folders are gone on with, or taken for what was asked for, and which are refused."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_wlb.data.tokenising import tokenise as job
from lightning_wlb.data.tokenising.tokenise import TokeniseRequest, tokenise
from tests.data.tokenising.support import (
    contents,
    exchange,
    saved,
    tokenizer,
    write_lines,
)

pytestmark = pytest.mark.usefixtures("small_shards")


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
        {str(2**61): {"documents": 20, "targets": 40, "skipped": 0}},
        [["0", {"documents": 20, "targets": 40, "skipped": 0}]],
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
    request_, unbroken, tmp_path
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
    # Nor by a link of this user's to what another has put there, nor by another's on the way.
    home = tmp_path / "home"
    home.mkdir()
    (home / "corpus").symlink_to(unbroken)
    assert tokenise(request_, home / "corpus")["documents"] == 300
    os.chown(unbroken, 65534, 65534)
    with pytest.raises(ValueError, match="corpus belongs to user 65534, and this process to user"):
        tokenise(request_, home / "corpus")
    unbroken.rename(home / "in")
    os.chown(home / "in", 0, 0)
    link.unlink()
    link.symlink_to(home)
    os.lchown(link, 65534, 65534)
    with pytest.raises(ValueError, match=f"by {link}, a link of user 65534, where others may"):
        tokenise(request_, link / "in")


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("mode", [0o1777, 0o3775])
def test_nor_are_another_users_files_in_an_open_folder(mode, request_, unbroken) -> None:
    unbroken.chmod(mode)
    assert tokenise(request_, unbroken)["documents"] == 300
    os.chown(unbroken / "lightning_wlb.json", 65534, 65534)
    with pytest.raises(ValueError, match=r"wlb\.json belongs to user 65534, and this process to"):
        tokenise(request_, unbroken)


def test_nothing_is_made_where_a_strangers_link_leads(request_, scratch) -> None:
    with pytest.raises(ValueError, match="a link of user 65534, where others may put what they"):
        tokenise(request_, scratch / "leads/new/out")
    assert not (scratch / "../home/new").exists()
