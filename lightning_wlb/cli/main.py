"""``lightning-wlb``: the entry point, which runs a subcommand and prints a user's mistake.

A subcommand is a module with ``add_arguments(parser)`` and ``run(arguments)``, and a line in
:data:`COMMANDS`. ``fit``, ``validate`` and ``test`` are LightningCLI's, which reads its own options
(:mod:`.train`). A mistake of the user raises ValueError; it is printed as one paragraph, and the
exit code is 2. ``LIGHTNING_WLB_TRACEBACK=1`` in the environment asks for the traceback instead.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from lightning_wlb.file_checks import printable

COMMANDS = {
    "export": "Write a checkpoint as a folder that transformers' from_pretrained opens.",
    "plan": "Compare packings on your documents' lengths, before a device is rented.",
    "profile": "Measure this device and write a device profile.",
    "tokenize": "Tokenise texts or chats into documents to train on.",
}
"""Subcommands, each a module of this package, which is imported when it is asked for."""

TRAINING = {
    "fit": "Train by a configuration file: LightningCLI, with trainer.strategy: wlb.",
    "validate": "Evaluate on the validation documents, by a configuration file.",
    "test": "Evaluate on the test documents, by a configuration file.",
}
"""LightningCLI's subcommands, and a line about each."""

_PATHS = FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError
_MISTAKES = ValueError, ModuleNotFoundError, argparse.ArgumentError, *_PATHS


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command line, or with the options of one subcommand ``only``."""
    whole = argparse.ArgumentParser(
        prog="lightning-wlb",
        description="Workload-balanced long-context training: tokenise documents, see what"
        " balancing gains on them, train, and take the model elsewhere.",
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary.rstrip("."), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if only in (None, name):
            module = _module(name)
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    for name, summary in TRAINING.items():
        commands.add_parser(name, help=summary.rstrip("."), add_help=False)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0, 2 for a mistake of the user, or 130."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = argv[0] if argv else ""
    try:
        if command in TRAINING:
            _module("train").run(argv)
        else:
            arguments = parser(command).parse_args(argv)
            arguments.run(arguments)
    except (Exception, KeyboardInterrupt) as error:
        ctrl_c = isinstance(error, KeyboardInterrupt)
        if not (ctrl_c or _is_mistake(error)) or os.environ.get("LIGHTNING_WLB_TRACEBACK"):
            raise
        # WLBStrategy has printed an error of one rank alone on that rank.
        if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
            said = "interrupted." if ctrl_c else _paragraph(error)
            print(f"lightning-wlb {command}: {said}", file=sys.stderr)
        return 130 if ctrl_c else 2
    return 0


def _module(name: str) -> ModuleType:
    return import_module(f"{__package__}.{name}")


def _is_mistake(error: BaseException) -> bool:
    """Whether an error is the user's; Lightning's kind is known once Lightning is imported."""
    if isinstance(error, ModuleNotFoundError):
        return not (error.name or "").startswith("lightning_wlb")
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    refused = () if lightning is None else (lightning.MisconfigurationException,)
    return isinstance(error, (*_MISTAKES, *refused))


def _paragraph(error: BaseException) -> str:
    """An error's message for the user, on one line."""
    # If an object cannot be made, jsonargparse lists all that it tried, and the object's own error
    # is the cause. If an argument is wrong, its outermost error names the argument.
    while (
        "\n" in str(error)
        and error.__cause__ is not None
        and not isinstance(error, argparse.ArgumentError)
    ):
        error = error.__cause__
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}."
    if isinstance(error, UnicodeDecodeError):
        text = f"one of the files that were given is no text in UTF-8 ({text})."
    if isinstance(error, ModuleNotFoundError) and "pip install" not in text:
        text += ". It comes with pip install 'lightning-wlb[train]', or [hf] for Hugging Face."
    if option := re.search(r"class_path '([\w.]+)':\s+(Option '\w+' is not accepted)", text):
        text = f"{option[1]}: {option[2]}. --help and --model.help list what is."
    if "Original Traceback" in text:  # from a loader worker
        text = text.strip().rpartition("\n")[2]
    return printable(" ".join(text.split()))


if __name__ == "__main__":
    sys.exit(main())
