r"""Tokenise texts or chats into documents to train on.

SOURCE is a .jsonl or .jsonl.gz file, a .txt or .md file (one document), or a folder of these. OUT
becomes a folder that `WLBDataModule(documents=...)` and `lightning-wlb plan --lengths` take. A run
that was interrupted goes on where it was if the same command is given again.

  lightning-wlb tokenize corpus.jsonl corpus-tokens --tokenizer tokenizer.json
  lightning-wlb tokenize chats.jsonl chats-tokens --tokenizer path/to/model --chats

Texts are encoded as the tokenizer does, with the special tokens that it adds by itself, and end in
its end-of-document token. Chats are written by the tokenizer's chat template, and only what the
assistant says may be a target. Lines that cannot be read end the command, with file and line.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lightning_wlb.data.tokenising.tokenise import COLUMNS, Kind, TokeniseRequest, tokenise
from lightning_wlb.file_checks import printable

MOST_ON_CPU = 4096
"""Longest context window that is proposed if there is no GPU."""

_BAR = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.add_argument("source", metavar="SOURCE", help="file or folder of texts or chats")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="a tokenizer.json file, or the folder or name of a Hugging Face tokenizer",
    )
    parser.add_argument(
        "--chats",
        action="store_true",
        help='the rows are chats: [{"role": "user", "content": "..."}, ...]',
    )
    parser.add_argument(
        "--column",
        help=f"of JSON lines (default: {COLUMNS['texts']}; {COLUMNS['chats']} with --chats)",
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument(
        "--eos",
        metavar="TOKEN",
        default=True,
        help="the token that ends a document, by its text (default: the tokenizer's own, if it"
        " has one; never twice)",
    )
    end.add_argument(
        "--no-eos", dest="eos", action="store_false", help="end documents where their text ends"
    )
    parser.add_argument(
        "--workers", type=int, help="processes (default: one a core); do not change the result"
    )


def run(arguments: argparse.Namespace) -> None:
    """Tokenise, and print a summary."""
    kind: Kind = "chats" if arguments.chats else "texts"
    request = TokeniseRequest(
        arguments.source, arguments.tokenizer, kind, arguments.column, arguments.eos
    )
    print(printable(request.describe()))
    begin = time.perf_counter()
    try:
        made = tokenise(request, arguments.out, arguments.workers)
    except OSError as error:
        raise ValueError(f"{error}. {_goes_on(arguments.out)}") from error
    except KeyboardInterrupt:
        raise ValueError(f"Interrupted. {_goes_on(arguments.out)}") from None
    seconds = time.perf_counter() - begin
    print(*summary(made, kind), sep="\n")
    print(f"In {seconds:.1f} s; the documents are in {arguments.out}. Next:\n")
    print(next_command(arguments.out, made))


def summary(made: dict[str, Any], kind: str) -> Iterator[str]:
    """The lines that say what was made, with the distribution of lengths as a picture.

    ``made`` is the content of the folder's ``lightning_wlb.json``.
    """
    documents, tokens = made["documents"], made["tokens"]
    yield (
        f"{_counted(documents, 'document')} with {tokens:,} tokens, {tokens / documents:,.0f} on"
        f" average, {made['longest']:,} the longest; vocabulary {made['vocab_size']:,}."
    )
    if kind == "chats":
        yield f"Of the tokens {made['targets'] / tokens:.1%} may be targets."
    if made["skipped"]:
        why = "nothing is learned" if kind == "chats" else "the text is empty"
        yield f"Skipped: {_counted(made['skipped'], 'row')} in which {why}."
    yield ""
    yield f"{'tokens':>21}  {'documents':>13}  share of tokens"
    counted = [number for number, (count, _) in enumerate(made["by_length"]) if count]
    for number in range(counted[0], counted[-1] + 1):
        count, share = made["by_length"][number][0], made["by_length"][number][1] / tokens
        lengths = f"{1 << number:,} to {(2 << number) - 1:,}"
        yield f"{lengths:>21}  {count:>13,}  {'█' * round(min(share, 1) * _BAR)} {share:.1%}"
    yield ""


def next_command(out: Path, made: dict[str, Any]) -> str:
    """The command that plans a run on these documents, on this machine."""
    gpus = 0
    with suppress(ImportError):  # tokenising does not need it
        import torch

        gpus = torch.cuda.device_count()
    # The least power of two above the lengths of the documents that hold 99 % of the tokens.
    shares = np.cumsum([tokens for _, tokens in made["by_length"]])
    window = 2 << int(np.argmax(shares >= 0.99 * made["tokens"]))
    model, profile = "7b", "h100"
    if not gpus:
        here = Path("examples/pretrain.yaml")
        model, profile = str(here) if here.is_file() else "tiny", "cpu"
        window = min(window, MOST_ON_CPU)
    return (
        f"  lightning-wlb plan --lengths {shlex.quote(str(out))}"
        f" --model {model},vocab_size={made['vocab_size']} --mesh auto --devices {gpus or 2} \\\n"
        f"      --micro-batches 4 --context-window {window} --profile {profile}"
    )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _goes_on(out: Path) -> str:
    return f"What is done lies in {out}, and the same command goes on from there."
