"""Texts and chats that a run names: tokenised once, kept, compared with what was written."""

import json
import multiprocessing
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightning_wlb
from lightning_wlb import file_checks
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.open_documents import documents
from lightning_wlb.data.tokenising import tokenise as job
from lightning_wlb.data.tokenising import tokenised_folder
from lightning_wlb.data.tokenising.tokenise import TokeniseRequest, tokenise, tokenised_once
from tests.data.tokenising.support import (
    PLAIN,
    columns,
    exchange,
    saved,
    saved_chat_tokenizer,
    tokenizer,
    write_lines,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(job, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "documents"


def test_texts_are_tokenised_once_until_something_changes(tmp_path, cache, monkeypatch) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "the fox", "body": "jumps"}])
    path = saved(tmp_path)
    folder = tokenised_once(TokeniseRequest(source, path))
    assert folder.parent == cache
    assert columns(folder) == {"input_ids": [[*tokenizer().encode("the fox").ids, 1]]}
    runs: list[Any] = []
    work = job._work
    monkeypatch.setattr(job, "_work", lambda *given: runs.append(given) or work(*given))
    assert tokenised_once(TokeniseRequest(source, path)) == folder
    assert not runs
    others = [
        tokenised_once(TokeniseRequest(source, path, **options))
        for options in ({"column": "body"}, {"eos": "</s>"})
    ]
    write_lines(source, [{"text": "the fox is quick"}])
    others.append(tokenised_once(TokeniseRequest(source, path)))
    exchange(source, b"quick", b"thick")
    others.append(tokenised_once(TokeniseRequest(source, path)))
    tokenizer(starts=True).save(path)
    others.append(tokenised_once(TokeniseRequest(source, path)))
    assert len({folder, *others}) == 6
    assert len(runs) == 5
    assert columns(others[4]) == {
        "input_ids": [[*tokenizer(starts=True).encode("the fox is thick").ids, 1]]
    }
    # A stranger's link, which may have led elsewhere meanwhile, has made nothing of the file's.
    (tmp_path / "link.jsonl").symlink_to(source)
    assert tokenised_once(TokeniseRequest(tmp_path / "link.jsonl", path)) not in others


@pytest.mark.parametrize("damage", ["changed", "longer", "gone", "more"])
def test_kept_documents_that_were_damaged_are_not_trained_on(damage, tmp_path, cache) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "the fox the fox the fox"}])
    request = TokeniseRequest(source, saved(tmp_path))
    (file,) = tokenised_once(request).glob("*.arrow")
    content = file.read_bytes()
    tokens = np.array(tokenizer().encode("the fox").ids, "<i4").tobytes()
    assert tokens in content
    if damage == "gone":
        file.unlink()
    elif damage == "more":
        file.with_name("data-1.arrow").write_bytes(content)
    else:
        other = tokens[::-1] if damage == "changed" else tokens + tokens
        file.write_bytes(content.replace(tokens, other, 1))
    for again in (tokenised_once, lambda request: tokenise(request, file.parent)):
        with pytest.raises(ValueError, match=r"not those that were written.*rm -r"):
            again(TokeniseRequest(source, request.tokenizer))


def test_of_a_large_corpus_sizes_alone_are_compared(tmp_path, cache, monkeypatch) -> None:
    monkeypatch.setattr(tokenised_folder, "_SUMMED_BYTES", 10)
    source = write_lines(tmp_path / "a.jsonl", [{"text": "the fox"}])
    folder = tokenised_once(TokeniseRequest(source, saved(tmp_path)))
    (file,) = folder.glob("*.arrow")
    content = json.loads((folder / "lightning_wlb.json").read_text())
    assert content["files"] == {file.name: [file.stat().st_size, None]}


def test_one_file_of_a_small_corpus_may_be_larger_than_a_description(tmp_path) -> None:
    with (tmp_path / "data-00000-of-00001.arrow").open("wb") as file:
        file.truncate(file_checks.SMALL_BYTES + 1)
    ((size, found),) = tokenised_folder._described(tmp_path).values()
    assert size == file_checks.SMALL_BYTES + 1
    assert found == zlib.crc32(bytes(size))


def test_one_of_several_ranks_does_the_work(tmp_path, cache, monkeypatch) -> None:
    monkeypatch.setattr(job, "_LOOK_SECONDS", 0.05)
    source = write_lines(tmp_path / "a.jsonl", [{"text": f"fox {each}"} for each in range(2000)])
    path, work = saved(tmp_path), job._work

    def counted(*given: Any) -> Any:
        (tmp_path / f"worked-{multiprocessing.current_process().pid}").touch()
        return work(*given)

    monkeypatch.setattr(job, "_work", counted)
    context = multiprocessing.get_context("fork")
    request = TokeniseRequest(source, path)
    ranks = [context.Process(target=tokenised_once, args=(request,)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert len(list(tmp_path.glob("worked-*"))) == 1
    assert len(list(cache.iterdir())) == 1


def test_a_tokenizer_must_be_named(tmp_path) -> None:
    for kind in ("texts", "chats"):
        with pytest.raises(ValueError, match=r"a.jsonl' need a tokenizer. Name a tokenizer.json"):
            lightning_wlb.documents({kind: str(tmp_path / "a.jsonl")})


def test_documents_opens_texts_chats_and_mixtures_of_them(tmp_path) -> None:
    pytest.importorskip("transformers")
    model = saved_chat_tokenizer(tmp_path / "model", PLAIN)
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "the fox"}, {"text": "jumps"}])
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    talks = write_lines(tmp_path / "b.jsonl", [{"messages": messages}])
    opened = lightning_wlb.documents(
        {
            "mixture": [
                {"documents": {"texts": str(lines), "tokenizer": model}, "weight": 0.7},
                {"documents": {"chats": str(talks), "tokenizer": model}, "weight": 0.3},
            ]
        }
    )
    expected = [[*tokenizer().encode(text).ids, 1] for text in ("the fox", "jumps")]
    assert [opened.read(each, 0, int(opened.lengths[each])).tolist() for each in (0, 1)] == expected
    assert opened.vocab_size == 300
    assert opened.mask(0, 0, 2) is None
    mask = opened.mask(2, 0, int(opened.lengths[2]))
    assert mask.tolist() == [False, False, False, False, True, True, True]
    with pytest.raises(ValueError, match=r"no option 'colum'. It takes tokenizer, column, eos"):
        lightning_wlb.documents({"texts": str(lines), "tokenizer": model, "colum": "a"})


def test_texts_with_a_tokenizer_are_opened(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "the fox"}, {"text": "jumps"}])
    store = lightning_wlb.documents({"texts": source, "tokenizer": saved(tmp_path)})
    wanted = [[*tokenizer().encode(text).ids, 1] for text in ("the fox", "jumps")]
    assert store.lengths.tolist() == [len(each) for each in wanted]
    assert store.read(0, 0, len(wanted[0])).tolist() == wanted[0]


def test_documents_of_two_vocabularies_are_warned_of(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "the fox"}] * 4)
    other = tokenizer()
    other.add_tokens(["another"])
    other.save(str(tmp_path / "other.json"))
    one, same, extended = (
        {"texts": str(source), "tokenizer": path, **options}
        for path, options in (
            (saved(tmp_path), {}),
            (saved(tmp_path, starts=True), {"eos": "</s>"}),  # other documents, same numbers
            (str(tmp_path / "other.json"), {}),
        )
    )

    def opened(*parts: Any) -> None:
        documents({"mixture": [{"documents": d, "weight": 1, "name": str(d)} for d in parts]})
        options = {"context_window": 8, "micro_batches": 1}
        WLBDataModule(parts[0], validation_documents=parts[1], **options)._stores()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(one, same)
    with pytest.warns(UserWarning, match="were tokenised with other vocabularies") as said:
        opened(same, extended)
    assert len(said) == 2
