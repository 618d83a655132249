"""Folders of Hugging Face tokenizers: the class that opens one, and what it reads."""

import base64
import json
import re
from pathlib import Path

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers, trainers

from lightning_wlb.data.tokenising.texts import TextEncoder
from tests.data.tokenising.support import LINES, documents, saved_chat_tokenizer, tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


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


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_so_is_one_whose_settings_name_the_file(kind, tmp_path) -> None:
    pytest.importorskip("transformers")
    settings = {"tokenizer_class": kind, "fast_tokenizer_files": ["tokenizer.4.0.0.json"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer().save(str(tmp_path / "tokenizer.4.0.0.json"))
    if kind == "LlamaTokenizer":
        with pytest.raises(ValueError, match=r"otherwise than its tokenizer\.4\.0\.0\.json says"):
            TextEncoder(str(tmp_path), "text", False)
    else:
        wanted = [tokenizer().encode("the fox").ids]
        assert documents(TextEncoder(str(tmp_path), "text", False), ["the fox"]) == wanted


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


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_settings_that_ask_for_code_reach_no_call_of_transformers(tmp_path, name, monkeypatch):
    """Some of its calls pass them on to others, past what was said to the first."""
    transformers = pytest.importorskip("transformers")
    path = Path(saved_chat_tokenizer(tmp_path, None))
    settings = json.loads((path / name).read_text()) if (path / name).exists() else {}
    (path / name).write_text(json.dumps(settings | {"trust_remote_code": False}))
    if name == "tokenizer_config.json":
        TextEncoder(str(path), "text")
    (path / name).write_text(json.dumps(settings | {"trust_remote_code": True}))
    monkeypatch.delattr(transformers.AutoTokenizer, "from_pretrained")
    with pytest.raises(ValueError, match="It asks for Python code of its own, which is not run"):
        TextEncoder(str(path), "text")


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


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("GemmaTokenizer", "tokenizer.json.bak"),
        ("T5Tokenizer", "tokenizer.vocab"),
        ("BertTokenizer", "chat_template.jinja"),
        ("BlenderbotTokenizer", "config.json"),
        ("WhisperTokenizer", "normalizer.json"),
        ("LlamaTokenizer", "spiece.model"),  # another family's
    ],
)
def test_a_folder_without_a_vocabulary_is_no_tokenizer(tmp_path, kind, left) -> None:
    """Every document would be made of unknown tokens."""
    pytest.importorskip("transformers")
    (tmp_path / left).write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    with pytest.raises(ValueError, match=r"the folder has no vocabulary: copy tokenizer\.json to"):
        TextEncoder(str(tmp_path), "text", False)


def test_a_tekken_file_is_a_vocabulary(tmp_path) -> None:
    """Byte n is token n + 3, behind the special tokens."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    letters = [{"token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)]
    sizes = {"default_vocab_size": 259, "default_num_special_tokens": 3, "num_vocab_tokens": 256}
    names = [{"rank": n, "token_str": name} for n, name in enumerate(("<unk>", "<s>", "</s>"))]
    facts = {"config": sizes | {"pattern": "."}, "vocab": letters, "special_tokens": names}
    (tmp_path / "tekken.json").write_text(json.dumps(facts))
    encoder = TextEncoder(str(tmp_path), "text", False)
    assert documents(encoder, ["fox"]) == [[ord(letter) + 3 for letter in "fox"]]


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
