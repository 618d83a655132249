"""Tokens are the tokenizer's own, with one end-of-document token."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb import model_folder_checks
from lightning_wlb.data.tokenising import texts
from lightning_wlb.data.tokenising.sources import Row
from lightning_wlb.data.tokenising.texts import USUAL_ENDS, TextEncoder
from tests.data.tokenising.support import LINES, documents, saved, tokenizer

TEXTS = st.lists(
    st.text(max_size=30) | st.sampled_from([*LINES, "", " \n", "ends</s>", "<s>starts"]), max_size=5
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("eos", [True, False, "</s>", "<s>"])
def test_tokens_are_the_tokenizers_own(folder, starts, ends, eos) -> None:
    model = tokenizer(starts=starts, ends=ends)
    encoder = TextEncoder(saved(folder, starts=starts, ends=ends), "text", eos)
    end = model.token_to_id("</s>" if eos is True else eos) if eos else None

    @given(TEXTS)
    def check(texts: list[str]) -> None:
        for text, tokens in zip(texts, documents(encoder, texts), strict=True):
            if not text.strip():
                assert tokens is None
                continue
            text = text.removeprefix("<s>") if starts else text
            expected = model.encode(text.removesuffix("</s>") if ends and end == 1 else text).ids
            if end is None or expected[-1] == end:
                assert tokens == expected
            else:
                assert tokens == [*expected, end]

    check()
    assert encoder.vocab_size == 300
    assert ("'<s>'" in encoder.describe()) == (starts or eos == "<s>")


def test_the_end_token_is_what_the_neighbour_of_the_file_says(tmp_path) -> None:
    path = saved(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": None}))
    assert "names none" in TextEncoder(path, "text").describe()
    # Without a neighbour it is the one special token that is usually that.
    for token in (None, "</s>", {"content": "</s>"}):
        config.unlink()
        if token is not None:
            config.write_text(json.dumps({"eos_token": token}))
        encoder = TextEncoder(path, "text")
        assert encoder.describe() == "Documents end in '</s>' (token 1)."
        assert documents(encoder, ["fox"]) == [[*tokenizer().encode("fox").ids, 1]]
        assert documents(TextEncoder(path, "text", False), ["fox"]) == [
            tokenizer().encode("fox").ids
        ]
        config.touch()
    config.unlink()
    model = tokenizer()
    model.add_special_tokens(["<|endoftext|>"])
    model.save(path)
    assert "names none" in TextEncoder(path, "text").describe()


def test_the_guide_names_the_tokens_that_end_documents_of_a_tokenizer_json_alone() -> None:
    guide = (Path(__file__).parents[3] / "docs/guide/texts.md").read_text()
    *first, last = (f"`{token}`" for token in USUAL_ENDS)
    assert f"{', '.join(first)} or {last}, if just one is" in guide


def test_a_tokenizer_that_cuts_and_pads_does_neither(tmp_path) -> None:
    model = tokenizer()
    model.enable_truncation(2)
    model.enable_padding(length=50)
    model.save(str(tmp_path / "tokenizer.json"))
    assert documents(TextEncoder(str(tmp_path), "text"), LINES) == [
        [*tokenizer().encode(line).ids, 1] for line in LINES
    ]


def test_a_hugging_face_tokenizer_gives_the_same(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(starts=True), bos_token="<s>", eos_token="</s>"
    )
    made.model_max_length = 4
    made.save_pretrained(tmp_path)
    encoder = TextEncoder(str(tmp_path), "text")
    assert documents(encoder, LINES) == [[*made(line)["input_ids"], 1] for line in LINES]
    assert encoder.describe() == (
        "Documents begin with what the tokenizer adds, '<s>' and end in '</s>' (token 1)."
    )
    digest = encoder.digest
    assert TextEncoder(str(tmp_path), "text").digest == digest
    assert TextEncoder(str(tmp_path), "text", False).digest != digest


def test_a_beginning_that_a_text_has_already_is_not_there_twice(folder) -> None:
    """As of texts that a chat template has written."""
    encoder = TextEncoder(saved(folder, starts=True), "text")
    fox = tokenizer().encode("the fox").ids
    texts = ["the fox", "<s>the fox", "<s>the fox</s>", "<s><s>the fox"]
    once = [0, *fox, 1]
    assert documents(encoder, texts) == [once, once, once, [0, *once]]
    plain = TextEncoder(saved(folder), "text")
    assert documents(plain, texts[:2]) == [[*fox, 1], once]


def test_rows_without_a_text_are_named(tmp_path) -> None:
    encoder = TextEncoder(saved(tmp_path), "text")
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n{}\n")
    for record, message in (
        ({"body": "a"}, r"a.jsonl:2 has no 'text', only 'body'. Name the column \(--column"),
        ({}, "a.jsonl:2 has no 'text', only nothing"),
        ({"messages": []}, r"Chats want --chats"),
        ({"text": None}, "a.jsonl:2: 'text' holds null, which is no text"),
        ({"text": [{"role": "user"}]}, r"These are chats: say so \(--chats"),
        ({"text": ["a", "b"]}, r"'text' holds \[\"a\", \"b\"\], which is no text\. Mend or remove"),
        ({"text": "ab\ud800"}, "a.jsonl:2: character 3 of the text is half of a surrogate pair"),
    ):
        with pytest.raises(ValueError, match=message):
            encoder.documents([Row(record, path, 3, 3)])


def test_what_a_tokenizer_s_library_panics_at_is_one_sentence(tmp_path) -> None:
    """A panic of Rust is no Exception, and ends a program that catches those."""
    panics = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    for name, content, message in (
        ("panics", {"normalizer": panics, "model": model}, "is no tokenizer of the tokenizers"),
        ("unknown", {"model": model}, "fails at these texts: .*Missing"),
        ("empty", {"model": model | {"vocab": {}}}, "has no tokens"),
        ("huge", {"model": model | {"vocab": {"a": 2**31}}}, r"has a token 2,147,483,648, beyond"),
        ("\x1b\udcff", {"model": {}}, r"/\\x1b\\udcff\.json is no tokenizer"),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"version": "1.0", "added_tokens": [], **content}))
        with pytest.raises(ValueError, match=message):
            TextEncoder(str(path), "text", eos=False).documents([Row({"text": "b"}, path, 1, 1)])


def test_tokenizers_that_are_not_there_are_answered(tmp_path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(ValueError, match=r"is no tokenizer of the tokenizers library"):
        TextEncoder(str(broken), "text")
    for end in ("<end>", ""):
        with pytest.raises(ValueError, match=f"'{end}' is not in the vocabulary of tokenizer"):
            TextEncoder(saved(tmp_path), "text", end)
    with pytest.raises(ValueError, match=r"no tokenizers file .*missing\.json"):
        TextEncoder(str(tmp_path / "missing.json"), "text")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json, which names the end-of-docum"):
        TextEncoder(saved(tmp_path), "text")
    (tmp_path / "tokenizer_config.json").unlink()
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"cannot be opened: .*Give a tokenizer.json file"):
        TextEncoder(str(tmp_path / "missing" / "folder"), "text")
    (tmp_path / "model").mkdir()
    config = '{"model_type": "qwen2", "num_hidden_layers": 3000000}'
    (tmp_path / "model" / "config.json").write_text(config)
    with pytest.raises(ValueError, match="num_hidden_layers=3,000,000: building more than 2,000"):
        TextEncoder(str(tmp_path / "model"), "text")


def test_counts_beside_a_tokenizer_in_the_hub_s_cache_are_looked_at(tmp_path, monkeypatch) -> None:
    snapshot = tmp_path / "models--some--one" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--one" / "refs").mkdir()
    (tmp_path / "models--some--one" / "refs" / "main").write_text("0" * 40)
    fields = {"model_type": "qwen3", "num_hidden_layers": 10**9}
    (snapshot / "config.json").write_text(json.dumps(fields))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(model_folder_checks, "hub_is_out_of_reach", lambda: True)
    with pytest.raises(ValueError, match=r"num_hidden_layers=1,000,000,000: building"):
        TextEncoder("some/one", "text")


def test_the_digest_is_of_the_tokenizer_that_is_used(tmp_path, monkeypatch) -> None:
    """Else what is kept of the tokenizer that takes its place meanwhile would be the old one's."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(Path(saved(tmp_path)).read_bytes())
    before = TextEncoder(str(path), "text").digest

    def exchanged(load):
        def loaded(given):
            made = load(given)
            path.write_text(path.read_text() + " ")
            return made

        return loaded

    made = texts.Tokenizer
    loads = {name: exchanged(getattr(made, name)) for name in ("from_file", "from_buffer")}
    monkeypatch.setattr(texts, "Tokenizer", SimpleNamespace(**loads))
    assert TextEncoder(str(path), "text").digest == before
    monkeypatch.setattr(texts, "Tokenizer", made)
    assert TextEncoder(str(path), "text").digest != before
