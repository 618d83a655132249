"""Small tokenizers, and what a tokenised folder holds by the datasets library's own reading."""

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from lightning_wlb.data.tokenising.sources import Row
from lightning_wlb.data.tokenising.texts import TextEncoder

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "def plan(lengths):\n    return sorted(lengths)  ",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
]
MARKED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")

TEXTS = [f"{number} foxes " + "jump " * (number % 37) for number in range(300)]


def tokenizer(starts: bool = False, ends: bool = False) -> Tokenizer:
    """A byte-pair tokenizer of 300 tokens that may add a beginning or an end by itself."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    model.train_from_iterator(LINES * 5, trainer)
    if starts or ends:
        single = f"{'<s> ' if starts else ''}$A{' </s>' if ends else ''}"
        tokens = [("<s>", 0), ("</s>", 1)]
        model.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    return model


def saved(folder: Path, **kinds: bool) -> str:
    """The path of a tokenizers file."""
    path = folder / f"tokenizer-{'-'.join(kinds)}.json"
    tokenizer(**kinds).save(str(path))
    return str(path)


def saved_chat_tokenizer(
    folder: Path, template: str | dict[str, str] | None, trims: bool = False
) -> str:
    """The folder of a Hugging Face tokenizer with a chat template.

    ``trims``: whether its offsets leave out the spaces at the ends of tokens.
    """
    from transformers import PreTrainedTokenizerFast

    model = tokenizer()
    if trims:
        model.post_processor = processors.ByteLevel(trim_offsets=True)
    made = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")
    made.chat_template = template
    made.save_pretrained(folder)
    return str(folder)


def documents(encoder: TextEncoder, texts: list[str]) -> list[list[int] | None]:
    """The tokens of each text, which has no mask."""
    rows = [Row({"text": text}, Path("a.txt"), 0, 1) for text in texts]
    made = encoder.documents(rows)
    assert all(document is None or document.mask is None for document in made)
    return [None if document is None else document.tokens.tolist() for document in made]


def write_lines(path: Path, records: list[Any]) -> Path:
    """A file of JSON lines."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def columns(folder: Path) -> dict[str, list[Any]]:
    """The columns of a tokenised folder, as Arrow's own reader finds them."""
    import pyarrow as pa

    tables = [pa.ipc.open_stream(path).read_all() for path in sorted(folder.glob("data-*.arrow"))]
    return pa.concat_tables(tables).to_pydict()


def exchange(path: str | Path, old: bytes, new: bytes) -> None:
    """Other bytes, as many, with the same times: as by an archive, or rsync -t."""
    path = Path(path)
    status, aside = path.stat(), path.with_name(".aside")
    assert old in path.read_bytes()
    aside.write_bytes(path.read_bytes().replace(old, new))
    os.utime(aside, ns=(status.st_atime_ns, status.st_mtime_ns))
    aside.replace(path)


def messages_of(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    """A chat's messages, of pairs of a role and a content."""
    return [{"role": role, "content": content} for role, content in chat]


def row(messages: Any) -> Row:
    """The first row of a file, with these messages."""
    return Row({"messages": messages}, Path("a.txt"), 0, 1)
