"""Tokens are the tokenizer's own, with one end-of-document token."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers, trainers

from lightning_wlb import model_folder_checks
from lightning_wlb.data.tokenising import texts
from lightning_wlb.data.tokenising.sources import Row
from lightning_wlb.data.tokenising.texts import USUAL_ENDS, TextEncoder
from tests.data.tokenising.support import LINES, saved, saved_chat_tokenizer, tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = st.lists(
    st.text(max_size=30) | st.sampled_from([*LINES, "", " \n", "ends</s>", "<s>starts"]), max_size=5
)


def documents(encoder: TextEncoder, texts: list[str]) -> list[list[int] | None]:
    rows = [Row({"text": text}, Path("a.txt"), 0, 1) for text in texts]
    made = encoder.documents(rows)
    assert all(document is None or document.mask is None for document in made)
    return [None if document is None else document.tokens.tolist() for document in made]


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


@pytest.mark.parametrize(
    "change",
    [
        normalizers.Replace("\u2019", "'"),
        pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|."), "isolated"),
    ],
    ids=["quotes", "regex"],
)
def test_so_is_one_in_words_of_another_language(change, tmp_path) -> None:
    """Of the usual words, by which classes can be told apart, the vocabulary has none."""
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    model = tokenizer()
    if isinstance(change, normalizers.Replace):
        model.normalizer = change
    else:
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.pre_tokenizer = pre_tokenizers.Sequence([change, whole])
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=ALPHABET)
    words = "\u0434\u043e\u043c (\u043a\u043e\u0442 it's) \u00ab\u0441\u043b\u043e\u043d\u00bb"
    model.train_from_iterator([words] * 20, trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"GPT2Tokenizer of transformers reads texts otherwise"):
        TextEncoder(str(tmp_path), "text", False)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_class_that_divides_texts_otherwise_than_the_file_is_refused(kind, tmp_path) -> None:
    """GPT2Tokenizer takes the vocabulary alone, and knows nothing of single digits (SmolLM's)."""
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    model = tokenizer()
    trainer = trainers.BpeTrainer(vocab_size=320, show_progress=False, initial_alphabet=ALPHABET)
    model.train_from_iterator([*LINES, *["in 1234567"] * 9], trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    wanted = documents(TextEncoder(str(tmp_path / "tokenizer.json"), "text", False), ["in 1234567"])
    assert documents(TextEncoder(str(tmp_path), "text", False), ["in 1234567"]) == wanted
    digits, whole = pre_tokenizers.Digits(individual_digits=True), model.pre_tokenizer
    model.pre_tokenizer = pre_tokenizers.Sequence([digits, whole])
    model.save(str(tmp_path / "tokenizer.json"))
    if kind == "GPT2Tokenizer":
        with pytest.raises(
            ValueError, match=r"GPT2Tokenizer of transformers reads texts otherwise"
        ):
            TextEncoder(str(tmp_path), "text")
    else:
        wanted = [model.encode("in 1234567").ids]
        assert documents(TextEncoder(str(tmp_path), "text", False), ["in 1234567"]) == wanted


@pytest.mark.parametrize(
    "settings",
    [{"added_tokens_decoder": {"0": {"content": "<s>"}}}, {"split_special_tokens": True}],
)
def test_a_class_that_knows_less_special_tokens_than_the_file_is_refused(settings, tmp_path):
    """It would read the end of a turn as letters."""
    pytest.importorskip("transformers")
    model = tokenizer()
    model.add_special_tokens(["<|im_end|>"])
    model.save(str(tmp_path / "tokenizer.json"))
    options = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    with pytest.raises(
        ValueError, match=r"reads texts otherwise .* anew with the tokenizer's save"
    ):
        TextEncoder(str(tmp_path), "text")
    options["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    if "split_special_tokens" not in settings:
        found = documents(TextEncoder(str(tmp_path), "text", False), ["the fox<|im_end|>"])
        assert found == [model.encode("the fox<|im_end|>").ids]


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


def test_a_tokenizer_of_one_s_own_beside_a_model_is_the_file_s(tmp_path) -> None:
    """For qwen2 AutoTokenizer takes Qwen2's own class, whatever the tokenizer's config says."""
    transformers = pytest.importorskip("transformers")
    model = tokenizer()
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("fox"), "isolated"), pre_tokenizers.ByteLevel(False)]
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>").save_pretrained(
        tmp_path
    )
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    for kind in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        fields = json.loads((tmp_path / "tokenizer_config.json").read_text())
        fields["tokenizer_class"] = kind
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
        encoder = TextEncoder(str(tmp_path), "text")
        assert documents(encoder, LINES) == [[*model.encode(line).ids, 1] for line in LINES]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("vocab", "/dev/zero"), ("merges", "/dev/zero"), ("gguf_file", "/dev/zero")),
        *(("vocab_file", "/dev/zero"), ("merges_file", "/dev/zero"), ("spm_file", "/dev/zero")),
        *(("init_inputs", ["/dev/zero"]), ("fast_tokenizer_files", ["/tmp/tokenizer.4.0.json"])),
    ],
)
def test_no_file_elsewhere_is_a_folder_s_vocabulary(tmp_path, field, value) -> None:
    """transformers opens it, a FIFO or a device too, and the record would not name it."""
    pytest.importorskip("transformers")
    fields = {"tokenizer_class": "GPT2Tokenizer", "vocab": {"a": 0}, "merges": []}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
        others = fields if name == "tokenizer_config.json" else {}
        (tmp_path / name).write_text(json.dumps(others | {field: value}))
        said = re.escape(f"{name} has {field}={value!r}, which may open files")
        with pytest.raises(ValueError, match=said):
            TextEncoder(str(tmp_path), "text")


@pytest.mark.parametrize(
    ("named", "config"),
    [
        ("BertJapaneseTokenizer", {}),
        ("CpmTokenizerFast", {}),  # of which AutoTokenizer takes CpmTokenizer
        (None, {"model_type": "canine"}),
        ("BertTokenizer", {"model_type": "canine", "model_name": "qwen2"}),
    ],
)
def test_no_class_of_python_opens_what_its_settings_name(tmp_path, named, config) -> None:
    """A FIFO or device would never end, and a library that a setting names would run."""
    transformers = pytest.importorskip("transformers")
    opens = vars(transformers.PreTrainedTokenizerBase)["from_pretrained"]
    name = Path(saved_chat_tokenizer(tmp_path, None))
    settings = json.loads((name / "tokenizer_config.json").read_text())
    (name / "config.json").write_text(json.dumps(config))
    TextEncoder(str(name), "text")  # the class that its settings name
    settings |= {"tokenizer_class": named, "word_tokenizer_type": "sudachi"}
    settings |= {"sudachi_kwargs": {"sudachi_config_path": "/dev/zero"}}
    (name / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"does not use the tokenizers library|requires the Sent"):
        TextEncoder(str(name), "text")
    assert vars(transformers.PreTrainedTokenizerBase)["from_pretrained"] is opens


@pytest.mark.parametrize("kind", ["GemmaTokenizer", "BertTokenizer"])
def test_a_folder_without_a_vocabulary_is_no_tokenizer(tmp_path, kind) -> None:
    """Every document would be made of unknown tokens."""
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    with pytest.raises(ValueError, match=r"the folder has no vocabulary: copy tokenizer\.json to"):
        TextEncoder(str(tmp_path), "text", False)


def test_a_map_of_special_tokens_has_nothing_else(tmp_path) -> None:
    """What it has takes the place of settings, a path of this folder's among them."""
    pytest.importorskip("transformers")
    name = Path(saved_chat_tokenizer(tmp_path, None))
    ordinary = {"eos_token": "</s>", "additional_special_tokens": ["</s>"], "image_token": "</s>"}
    (name / "special_tokens_map.json").write_text(json.dumps(ordinary))
    TextEncoder(str(name), "text")
    (name / "special_tokens_map.json").write_text(json.dumps(ordinary | {"tokenizer_file": None}))
    with pytest.raises(ValueError, match=r"map.json has tokenizer_file=None, which may"):
        TextEncoder(str(name), "text")


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
