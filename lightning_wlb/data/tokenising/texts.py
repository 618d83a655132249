"""From texts to token numbers, by a tokenizer that the user names.

A tokenizer is a ``tokenizer.json`` file of the tokenizers library, or the folder or name of a
Hugging Face tokenizer, which needs transformers. A document's tokens are the tokens of its text,
with the special tokens that the tokenizer adds (such as a beginning-of-text token), and then the
end-of-document token. Tokens that the text already has at its beginning or end are not added twice.
Settings of the tokenizer that cut or pad texts are turned off: documents are never cut here.

Cost: the tokenizer's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, takewhile
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from lightning_wlb.data.tokenising.sources import Row
from lightning_wlb.file_checks import printable, read_bytes, read_json
from lightning_wlb.model_folder_checks import check_beside, check_model, hub_copy, is_here

USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Special tokens that count as the end of a document if a tokenizer has exactly one of them."""

_SAMPLE = (
    "a\nIt's 1234567 of 89 Foxes,  they'LL\tjump...\n\n    def f(x): return x**2 # \u00dcber"
    " nai\u0308ve \ufb01 caf\u00e9 \u4f60\u597d \uff21 \u0416\u0443\u043a \U0001f98a"
    " e-mail@x.org \u0939\u093f\u0928\u094d\u0926\u0940 \u0e17\u0e35\u0e48\u0e19\u0e35\u0e48"
    " \u0645\u064e\u0631\u0652\u062d\u064e\u0628\u064b\u0627\r\n  end "
)
"""A text that tokenizers with different rules divide differently."""
_BETWEEN = (" ", "\u2019", " (", "\u201c", "\n", " \u0451", "-", "1", "A", "  ", "\u2014", ".")

_GENERIC = "PreTrainedTokenizerFast", "TokenizersBackend"
"""Classes of transformers that read a tokenizer.json like the tokenizers library."""
_NO_LIBRARY = "does not use the tokenizers library: convert it first"
EXTRA = "pip install 'lightning-wlb[hf]'"


class Document(NamedTuple):
    """Tokens of a document, int32, and which of them may be targets; None: all may."""

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_] | None = None


class TextEncoder:
    """Makes documents from rows with texts, in any process.

    Args:
        name: a ``tokenizer.json`` file, or the folder or name of a Hugging Face tokenizer.
        column: the rows' column that holds the text.
        eos: the end-of-document token: True: the tokenizer's, if any; a token's text; False: none.

    Attributes:
        vocab_size: tokens are in ``[0, vocab_size)``.
        vocabulary: a fingerprint of the tokens and their numbers.
        digest: a fingerprint of everything that decides the resulting tokens.
        masked: whether documents have masks.

    Raises:
        ValueError: no such tokenizer, or no such token in it.
    """

    masked = False

    def __init__(self, name: str, column: str, eos: bool | str = True) -> None:
        self._column, self._eos = column, eos
        file = tokenizer_file(name)
        if file is not None:
            with explained(f"{file} is no tokenizer of the tokenizers library"):
                definition = read_bytes(file, 1 << 28)  # once, so the digest fits what is used
                self._tokenizer = Tokenizer.from_buffer(definition)
            own = _eos_beside(file, self._tokenizer)
        else:
            loaded = hugging_face_tokenizer(name)
            self._tokenizer, own = loaded.backend_tokenizer, loaded.eos_token
            definition = self._tokenizer.to_str().encode()
        self.vocab_size, self.vocabulary = plain_vocabulary(self._tokenizer, name)
        vocabulary = self._tokenizer.get_vocab()
        end = own if eos is True else None if eos is False else eos
        if end is not None and end not in vocabulary:
            raise ValueError(
                f"The end-of-document token {end!r} is not in the vocabulary of tokenizer {name}."
                " Name one that is, or ask for none (--no-eos, eos: false)."
            )
        self._end, self._end_number = end, None if end is None else vocabulary[end]
        with explained(f"The tokenizer {name!r} fails"):
            encoded = self._tokenizer.encode("a")
        marked = zip(encoded.ids, encoded.tokens, encoded.special_tokens_mask, strict=True)
        added = list(takewhile(lambda each: each[2], marked))
        self._added, self._begin = [each[1] for each in added], [each[0] for each in added]
        self._ends = encoded.ids[-1:] == [self._end_number]  # the tokenizer adds it itself
        # Changes the digest: older versions may have written beginning or end twice.
        once = ["once"] * bool(added) + ["end once"] * self._ends
        self.digest = digest_of(definition, self._end_number, *once)

    def documents(self, rows: Sequence[Row]) -> list[Document | None]:
        """The tokens of each row's text; None for a text that is empty or only white space."""
        texts = [_text_of(row, self._column) for row in rows]
        wanted = [number for number, text in enumerate(texts) if text and not text.isspace()]
        with explained("The tokenizer fails at these texts"):
            encoded = self._tokenizer.encode_batch_fast([texts[each] for each in wanted])
        result: list[Document | None] = [None] * len(rows)
        for number, tokens in zip(wanted, (each.ids for each in encoded), strict=True):
            if not tokens:
                continue
            if self._begin and tokens[len(self._begin) :][: len(self._begin)] == self._begin:
                del tokens[: len(self._begin)]
            if self._ends and tokens[-2:] == [self._end_number] * 2:
                tokens.pop()
            if self._end_number is not None and tokens[-1] != self._end_number:
                tokens.append(self._end_number)
            result[number] = Document(np.array(tokens, np.int32))
        return result

    def describe(self) -> str:
        """A description of the tokens that mark the beginning and the end of a document."""
        added = " ".join(map(repr, self._added))
        start = f"begin with what the tokenizer adds, {added}" if added else ""
        if self._end is not None:
            end = f"end in {self._end!r} (token {self._tokenizer.token_to_id(self._end)})"
        elif self._eos is False:
            end = "have no end-of-document token, as asked"
        else:
            end = "have no end-of-document token, as the tokenizer names none (eos adds one)"
        return f"Documents {' and '.join(filter(None, (start, end)))}."


def plain_vocabulary(tokenizer: Tokenizer, name: str) -> tuple[int, str]:
    """Let a tokenizer neither cut nor pad texts; returns its vocabulary's size and digest.

    Raises:
        ValueError: the tokenizer has no tokens, or numbers too large for documents' files.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab()
    numbers = vocabulary.values()
    if not 0 <= max(numbers, default=-1) < 1 << 31:
        has = f"a token {max(numbers):,}, beyond 2^31" if numbers else "no tokens"
        raise ValueError(f"The tokenizer {name!r} has {has}. Give one that was trained.")
    return max(numbers) + 1, digest_of(sorted(vocabulary.items()))


def _text_of(row: Row, column: str) -> str:
    text = column_of(row, column)
    if not isinstance(text, str):
        raise ValueError(
            f"{row.place()}: {column!r} holds {json.dumps(text)[:80]}, which is no text."
            + (" These are chats: say so (--chats, chats:)." if str(text)[:2] == "[{" else "")
            + " Mend or remove the line."
        )
    check_encodable(row, text)
    return text


def column_of(row: Row, column: str) -> Any:
    """A row's value in a column; if it has none, ValueError with file and line."""
    if column not in row.record:
        raise ValueError(
            f"{row.place()} has no {column!r}, only {', '.join(map(repr, row.record)) or 'nothing'}"
            f". Name the column (--column, column:), or mend the line."
            + (" Chats want --chats (chats:)." if "messages" in row.record else "")
        )
    return row.record[column]


def check_encodable(row: Row, text: str) -> None:
    """Refuse half of a surrogate pair, which JSON can write but tokenizers cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{row.place()}: character {error.start + 1} of the text is half of a surrogate pair."
            " Mend or remove the line."
        ) from error


def tokenizer_file(name: str) -> Path | None:
    """The tokenizers file that ``name`` names; None for a Hugging Face tokenizer."""
    path = Path(name)
    if path.is_dir() and not (path / "tokenizer_config.json").is_file():
        path = path / "tokenizer.json"
        check_beside(path.parent, path)
    return path if is_here(name) and path.is_file() else None


def hugging_face_tokenizer(name: str) -> Any:
    """A tokenizer of transformers, by folder or name.

    Raises:
        ValueError: no transformers, no such tokenizer, or one without the tokenizers library.
    """
    if name.endswith(".json"):
        raise ValueError(f"There is no tokenizers file {name!r}. Check the path.")
    try:
        import transformers
        from transformers.models.auto.tokenization_auto import (
            TOKENIZER_MAPPING_NAMES,
            get_tokenizer_config,
        )
        from transformers.tokenization_utils_base import get_fast_tokenizer_file
    except ImportError as error:
        raise ValueError(
            f"The tokenizer {name!r} is no tokenizer.json file, others need transformers: {EXTRA}."
        ) from error
    with explained(f"The tokenizer {name!r} cannot be opened"):
        folder = Path(name) if is_here(name) else hub_copy(name)
        check_model(folder)
        options = {"trust_remote_code": False, "local_files_only": True}
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **options)
        except (ValueError, OSError):  # no model config, which AutoTokenizer then ignores too
            config = transformers.PretrainedConfig.from_pretrained(folder, local_files_only=True)
        settings = get_tokenizer_config(folder, local_files_only=True)
        # A tokenizer made of several (RAG's) opens them without these options.
        families = map(TOKENIZER_MAPPING_NAMES.get, _model_types(config.to_dict()))
        named = settings.get("tokenizer_class"), getattr(config, "tokenizer_class", None)
        _check_classes(*named, *families)
        # For some families (Qwen2) AutoTokenizer uses their own class instead of the generic one,
        # which reads only the vocabulary from the tokenizer.json.
        generic = settings.get("tokenizer_class") in _GENERIC
        opener = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
        with _no_class_in_python():
            tokenizer = opener.from_pretrained(str(folder), config=config, **options)
        file = folder / get_fast_tokenizer_file(settings.get("fast_tokenizer_files", []))
        files = {*tokenizer.vocab_files_names.values(), file.name, "tekken.json", "tiktoken.model"}
        files = files - {"tokenizer_config.json", "normalizer.json"} | {"tokenizer.model"}
        if not any((folder / name).is_file() for name in files):
            raise ValueError("the folder has no vocabulary: copy tokenizer.json to it")
        if not tokenizer.is_fast:  # Mistral's own
            raise ValueError(f"{type(tokenizer).__name__} {_NO_LIBRARY}")
        if file.is_file():
            _check_as_in_file(tokenizer, file)
    return tokenizer


def _check_as_in_file(tokenizer: Any, file: Path) -> None:
    """Refuse a tokenizer that reads texts differently from its tokenizer.json.

    Some classes of transformers (GPT2Tokenizer, Qwen2Tokenizer) read only the vocabulary from that
    file, and divide texts by their own family's rules for numbers, accents or capitals.
    """
    found, own = [], Tokenizer.from_buffer(read_bytes(file, 1 << 28))
    # Words of the vocabulary, after characters that may divide or be replaced.
    numbers = range(0, own.get_vocab_size(), 1 + own.get_vocab_size() // 2000)
    words = (own.decode([number]).strip() for number in numbers)
    sample = _SAMPLE + "".join(map(add, cycle(_BETWEEN), words))
    # Special and other added tokens, with text around them.
    for token in own.get_added_tokens_decoder().values():
        sample += f"{token.content}b{token.content} c{token.content}\nd"
    own.encode_special_tokens = tokenizer.backend_tokenizer.encode_special_tokens
    for each in (own, tokenizer.backend_tokenizer):
        each.no_truncation()
        each.no_padding()
        # Settings beside the file may also decide what is put before the first word.
        encoded = each.encode(sample, add_special_tokens=False)
        starts = [start for start, _ in encoded.offsets]
        found.append([number for number, at in zip(encoded.ids, starts, strict=True) if at > 1])
    if found[0] != found[1]:
        kind = type(tokenizer).__name__
        raise ValueError(
            f"{kind} of transformers reads texts otherwise than its {file.name} says; if that file"
            ' is the model\'s, write "tokenizer_class": "PreTrainedTokenizerFast" into'
            " tokenizer_config.json (for texts, the file alone may be given, too), else write the"
            " file anew with the tokenizer's save_pretrained"
        )


def _model_types(fields: Mapping[str, Any]) -> Iterator[str]:
    """The families of a config and of the configs in it; AutoTokenizer reads ``encoder``."""
    if isinstance(kind := fields.get("model_type"), str):
        yield kind
    for each in fields.values():
        if isinstance(each, Mapping):
            yield from _model_types(each)


def _check_classes(*names: Any) -> None:
    """Refuse names that are no tokenizer's class, which AutoTokenizer would let read the folder.

    It accepts any name in transformers, and does not pass its setting for untrusted code on: a
    model's class would build the model, and import code that adapters beside it name.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    for name in filter(None, names):
        found = tokenizer_class_from_name(name) or tokenizer_class_from_name(f"{name}Fast")
        # If transformers does not know the class, it uses another.
        if found and not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            raise ValueError(
                f"{name}, by its tokenizer_class or a config's model_type, is no tokenizer's class"
            )


@contextmanager
def _no_class_in_python() -> Iterator[None]:
    """Let transformers open no tokenizer in Python, whichever class it chooses.

    It would open what its settings name: a file without end, or a library, which runs.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    opens = vars(PreTrainedTokenizerBase)["from_pretrained"]

    def checked(cls: type, *given: Any, **options: Any) -> Any:
        if not issubclass(cls, PreTrainedTokenizerFast):
            raise ValueError(f"{cls.__name__} {_NO_LIBRARY}")
        return opens.__func__(cls, *given, **options)

    PreTrainedTokenizerBase.from_pretrained = classmethod(checked)
    try:
        yield
    finally:
        PreTrainedTokenizerBase.from_pretrained = opens


def reason(error: BaseException) -> str:
    """Why transformers could not open something; if it asks to run custom code, with the remedy."""
    if "trust_remote_code" not in str(error):
        return str(error) or type(error).__name__
    return (
        "It asks for Python code of its own, which is not run. If you trust that code, import its"
        " classes yourself, and register them before (AutoConfig.register, AutoTokenizer.register,"
        " AutoModelForCausalLM.register of transformers)."
    )


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn every error of a tokenizer library into a ValueError, even panics of Rust code."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        first = reason(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{printable(f'{what}: {first}')}. Give a tokenizer.json file, or the folder or name of"
            " a Hugging Face tokenizer."
        ) from error


def digest_of(*parts: object) -> str:
    """A fingerprint of everything that decides the tokens."""
    fingerprint = hashlib.sha256()
    for part in parts:
        fingerprint.update(part if isinstance(part, bytes) else repr(part).encode())
        fingerprint.update(b"\0")
    return fingerprint.hexdigest()[:16]


def _eos_beside(file: Path, tokenizer: Tokenizer) -> str | None:
    """The end token that ``tokenizer_config.json`` names; without that file, a usual end token.

    A ``tokenizer.json`` says which tokens are special, but not which of them ends a document. So
    without the other file exactly one of its special tokens must be in ``USUAL_ENDS``.
    """
    neighbour = file.with_name("tokenizer_config.json")
    check_beside(file, neighbour)
    if not neighbour.is_file():
        added = tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        usual = [token for token in special if token in USUAL_ENDS]
        return usual[0] if len(usual) == 1 else None
    try:
        token = read_json(neighbour).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{neighbour}, which names the end-of-document token of {file.name}, cannot be read:"
            f" {error}. Mend or remove it."
        ) from error
    return token["content"] if isinstance(token, dict) else token
