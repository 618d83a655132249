"""What every benchmark prints: a parser, tables, and one JSON object as the last line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_wlb.cost.profile import Profile

REMOVED = "removed"
"""Key in a file of results: what was measured last of methods that are no longer in the package."""


NUMBERS = {
    "rounds": "how often every way is measured, in turns",
    "steps": "steps of a turn, of which the first does not count",
    "tokens": "tokens of an epoch",
    "window": "context window",
    "micro_batches": "micro-batches of a global batch, N",
}
"""Options of scripts that measure steps."""


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of a script.

    Args:
        module: name of the script, without the package.
        doc: its docstring; the first line describes it.
    """
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=(doc or "").split("\n")[0]
    )


def settings_parser(
    module: str, doc: str | None, settings: Collection[str], steps: int, profile: str = "h100"
) -> argparse.ArgumentParser:
    """:func:`parser` of a script that simulates steps of named settings, and can go on later.

    Args:
        module: name of the script, without the package.
        doc: its docstring.
        settings: names of all its settings.
        steps: how many it simulates of each by default.
        profile: device profile by default.
    """
    made = parser(module, doc)
    add = made.add_argument
    add("--settings", nargs="*", default=list(settings), choices=settings, help="default: all")
    add("--steps", type=int, default=steps, help=f"steps of each (default {steps})")
    add("--profile", default=profile, help=f"device profile (default {profile})")
    add("--output", type=Path, help="a .json that is gone on with; pages are written beside it")
    return made


def measured_parser(module: str, doc: str | None, **defaults: int) -> argparse.ArgumentParser:
    """:func:`parser` of a script that measures steps; the result is kept unless told otherwise.

    Args:
        module: name of the script, without the package.
        doc: its docstring.
        defaults: defaults of its options in :data:`NUMBERS`.
    """
    made = parser(module, doc)
    for name, value in {**defaults, "micro_batches": 4}.items():
        option = "--" + name.replace("_", "-")
        made.add_argument(option, type=int, default=value, help=f"{NUMBERS[name]} ({value})")
    made.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("results") / f"{module}.json",
        help="where to write the JSON object too",
    )
    return made


def numbers_of(arguments: argparse.Namespace) -> dict[str, int]:
    """The options of :func:`measured_parser` that are whole numbers."""
    return {name: value for name, value in vars(arguments).items() if type(value) is int}


def gone_on_with(
    module: str, profile: Profile, arguments: argparse.Namespace
) -> tuple[dict[str, Any], Callable[[], None]]:
    """The result to go on with from ``--output``, and what saves it there.

    Raises:
        SystemExit: the file is of another profile or number of steps.
    """
    facts = {
        "benchmark": module,
        "steps": arguments.steps,
        "profile": profile.name,
        "provenance": profile.provenance,
    }
    output: Path | None = arguments.output
    result = json.loads(output.read_text()) if output and output.exists() else {**facts}
    if any(result[name] != value for name, value in facts.items()):
        raise SystemExit(f"{output} is of another profile or number of steps: give another file")

    def save() -> None:
        if output:
            output.write_text(json.dumps(result) + "\n")

    return result, save


def table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None
) -> Table:
    """A table to print: the first column to the left, figures to the right."""
    made = Table(title=title, caption=caption)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return made


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The same as the lines of a page."""
    head, *body = ["| " + " | ".join(row) + " |" for row in (headings, *rows)]
    return [head, "|---|" + "---:|" * (len(headings) - 1), *body]


def finish(
    result: dict[str, Any],
    save: Path | None = None,
    page: Callable[[dict[str, Any]], str] | None = None,
) -> None:
    """Print the result as one line of JSON, the last that a script prints.

    Args:
        result: in plain types.
        save: a path that it is written to as well, as ``.json``; what is there under
            :data:`REMOVED` stays.
        page: makes the page that is then written beside it, as ``.md``.
    """
    if save is not None:
        path = save.with_suffix(".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        content = with_removed(result, path)
        path.write_text(json.dumps(content) + "\n")
        if page is not None:
            path.with_suffix(".md").write_text(page(content))
    print(json.dumps(result))


def with_removed(result: dict[str, Any], path: Path) -> dict[str, Any]:
    """The result with what the file, if there is one, has under :data:`REMOVED`."""
    before = json.loads(path.read_text()) if path.exists() else {}
    return {**result, REMOVED: before[REMOVED]} if REMOVED in before else result


def write_page(
    name: str,
    doc: str | None,
    page: Callable[[dict[str, Any]], str],
    argv: Sequence[str] | None = None,
    picture: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """The command of a script whose figures are kept: print its page, and write it anew.

    Args:
        name: of the script and of its result.
        doc: its docstring.
        page: makes the page of the result.
        argv: arguments of the command; None: the process's.
        picture: draws the result, to a path.
    """
    options = parser(name, doc)
    kept = Path(__file__).with_name("results") / f"{name}.json"
    options.add_argument("--kept", type=Path, default=kept, help="the result (default: the kept)")
    path: Path = options.parse_args(argv).kept
    result = json.loads(path.read_text())
    path.with_suffix(".md").write_text(page(result))
    if picture is not None:
        picture(result, path.with_suffix(".png"))
    print(page(result))
