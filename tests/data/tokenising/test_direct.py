"""Texts and chats are tokenised once for each state of their source."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import lightning_wlb
from lightning_wlb.data.tokenising import TokeniseRequest, chats, direct, job, texts, tokenise
from tests.data.tokenising.support import (
    PLAIN,
    columns,
    contents,
    saved,
    saved_chat_tokenizer,
    tokenizer,
    write_lines,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(direct, "cache_folders", lambda: [Path("/dev/null/no"), tmp_path / "cache"])
    return tmp_path / "cache" / "documents"


def test_texts_are_tokenised_once_until_something_changes(tmp_path, cache, monkeypatch) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "the fox", "body": "jumps"}])
    path = saved(tmp_path)
    folder = texts(source, path)
    assert folder.parent == cache
    assert columns(folder) == {"input_ids": [tokenizer().encode("the fox").ids]}
    runs: list[Any] = []
    work = job._work
    monkeypatch.setattr(job, "_work", lambda *given: runs.append(given) or work(*given))
    assert texts(source, tokenizer=path) == folder
    assert not runs
    others = [texts(source, path, column="body"), texts(source, path, eos="</s>")]
    write_lines(source, [{"text": "the fox is quick"}])
    others.append(texts(source, path))
    tokenizer(starts=True).save(path)
    others.append(texts(source, path))
    assert len({folder, *others}) == 5
    assert len(runs) == 4
    assert columns(others[3]) == {
        "input_ids": [tokenizer(starts=True).encode("the fox is quick").ids]
    }


def test_chats_are_what_the_command_makes_of_them(tmp_path) -> None:
    pytest.importorskip("transformers")
    model = saved_chat_tokenizer(tmp_path / "model", PLAIN)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    source = write_lines(tmp_path / "a.jsonl", [{"messages": messages}])
    tokenise(TokeniseRequest(source, model, "chats"), tmp_path / "out")
    assert contents(chats(source, model)) == contents(tmp_path / "out")


def test_one_of_several_ranks_does_the_work(tmp_path, cache, monkeypatch) -> None:
    monkeypatch.setattr(job, "_LOOK_SECONDS", 0.05)
    source = write_lines(tmp_path / "a.jsonl", [{"text": f"fox {each}"} for each in range(2000)])
    path, work = saved(tmp_path), job._work

    def counted(*given: Any) -> Any:
        (tmp_path / f"worked-{multiprocessing.current_process().pid}").touch()
        return work(*given)

    monkeypatch.setattr(job, "_work", counted)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=texts, args=(source, path)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert len(list(tmp_path.glob("worked-*"))) == 1
    assert len(list(cache.iterdir())) == 1


def test_a_tokenizer_must_be_named(tmp_path) -> None:
    for opened in (texts, chats):
        with pytest.raises(ValueError, match=r"a.jsonl' need a tokenizer. Name a tokenizer.json"):
            opened(tmp_path / "a.jsonl")


def test_where_nothing_can_be_written_the_command_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(direct, "cache_folders", lambda: [Path("/dev/null/no")])
    source = write_lines(tmp_path / "a.jsonl", [{"text": "the fox"}])
    with pytest.raises(ValueError, match=r"/dev/null/no can be written to. Tokenise by the comm"):
        texts(source, saved(tmp_path))


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
    assert mask is not None
    assert mask.tolist() == [False, False, False, False, True, True, True]
    with pytest.raises(ValueError, match=r"no option 'colum'. It takes tokenizer, column, eos"):
        lightning_wlb.documents({"texts": str(lines), "tokenizer": model, "colum": "a"})


def test_a_path_of_texts_with_a_tokenizer_is_opened(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "the fox"}, {"text": "jumps"}])
    store = lightning_wlb.documents(str(source), tokenizer=saved(tmp_path))
    wanted = [tokenizer().encode(text).ids for text in ("the fox", "jumps")]
    assert store.lengths.tolist() == [len(each) for each in wanted]
    assert store.read(0, 0, len(wanted[0])).tolist() == wanted[0]
