"""``lightning-wlb``: the entry point, which knows the subcommands and answers mistakes.

A subcommand is a module with ``add_arguments(parser)`` and ``run(arguments)``, and a line in
:data:`COMMANDS`. ``fit``, ``validate`` and ``test`` are LightningCLI's, which reads its own options
(:mod:`.train`). A mistake of the user raises ValueError; it is printed as one paragraph without a
traceback, which the environment variable ``LIGHTNING_WLB_TRACEBACK=1`` asks for, and the exit code
is 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.cli import consolidate, export, plan, profile, tokenize, train

COMMANDS: dict[str, ModuleType] = {
    "consolidate": consolidate,
    "export": export,
    "plan": plan,
    "profile": profile,
    "tokenize": tokenize,
}
"""Subcommands by name."""

_MISTAKES = ValueError, MisconfigurationException, FileNotFoundError, argparse.ArgumentError


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = argparse.ArgumentParser(
        prog="lightning-wlb",
        description="Workload-balanced long-context training: tokenise documents, see what"
        " balancing gains on them, train, and take the model elsewhere.",
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in COMMANDS.items():
        assert module.__doc__ is not None
        summary = module.__doc__.partition("\n")[0]
        command = commands.add_parser(
            name,
            help=summary.rstrip("."),
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    for name, summary in train.SUBCOMMANDS.items():
        commands.add_parser(name, help=summary.rstrip("."), add_help=False)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0, or 2 for a mistake of the user."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in train.SUBCOMMANDS:
        return _answer(argv[0], lambda: train.run(argv))
    arguments = parser().parse_args(argv)
    return _answer(arguments.command, lambda: arguments.run(arguments))


def _answer(command: str, run: Callable[[], None]) -> int:
    """Run a command, and print a mistake of the user without a traceback."""
    try:
        run()
    except _MISTAKES as error:
        if os.environ.get("LIGHTNING_WLB_TRACEBACK"):
            raise
        if (rank := _speaker(error)) is not None:
            print(f"lightning-wlb {command}{rank}: {_paragraph(error)}", file=sys.stderr)
        return 2
    return 0


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
    if "Original Traceback" in text:  # from a loader worker
        text = text.strip().rpartition("\n")[2]
    return " ".join(text.split())


def _speaker(error: BaseException) -> str | None:
    """The text, empty or with the rank, after the command's name; None: this rank says nothing.

    Errors of configuration, and errors before there is a process group, are the same on all ranks:
    the first rank of each node says them.
    """
    first = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
    if isinstance(error, MisconfigurationException) or not dist.is_initialized():
        return "" if first else None
    return f" (rank {dist.get_rank()})"


if __name__ == "__main__":
    sys.exit(main())
