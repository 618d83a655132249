"""Checks of a user's arguments: a plain Python value, or a ValueError with value and remedy.

Each function returns what its docstring says, and raises ValueError for anything else. Numbers of
numpy and torch are accepted and become Python's, because settings go into JSON, fingerprints and
checkpoints, which hold plain types. True as a number and 32.0 as a whole number are refused:
whoever passes them meant something else. ``name`` and ``value`` are those of the argument.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A whole number of at least ``least``."""
    wanted = "a whole number" if least is None else f"a whole number of at least {least}"
    try:
        number = None if _is_truth(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise wrong_type(name, value, wanted)
    if least is not None and number < least:
        raise ValueError(f"{name}={value!r}, but it must be at least {least}. Give {wanted}.")
    return number


def wholes(name: str, value: Any, least: int | None = None) -> tuple[int, ...]:
    """A sequence of whole numbers of at least ``least`` each."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise wrong_type(name, value, "a sequence of whole numbers")
    return tuple(whole(name, each, least) for each in value)


def number(
    name: str, value: Any, least: float = -math.inf, most: float = math.inf, above: bool = False
) -> float:
    """A finite number from ``least`` to ``most``; with ``above`` it must be above ``least``."""
    wanted = (
        "a number" if least == -math.inf else f"a number {'above' if above else 'from'} {least:g}"
    )
    if most < math.inf:
        wanted += f" to {most:g}"
    if _is_truth(value) or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise wrong_type(name, value, wanted)
    result = float(value)
    if not (math.isfinite(result) and least <= result <= most) or (above and result == least):
        raise ValueError(f"{name}={value!r} is out of range. Give {wanted}.")
    return result


def flag(name: str, value: Any) -> bool:
    """True or False; a text is refused, since ``"false"`` would count as true."""
    if not _is_truth(value):
        raise wrong_type(name, value, "True or False")
    return bool(value)


def choice(name: str, value: Any, known: Iterable[str]) -> str:
    """One of the known names, which the error lists."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(names)}. Choose one of these.")
    return value


def check_names(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names of options that ``what`` does not have; the error lists those that it has."""
    if unknown := [name for name in given if name not in known]:
        takes = ", ".join(known) or "none"
        raise ValueError(f"{what} has no option {unknown[0]!r}. It takes {takes}.")


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def wrong_type(name: str, value: Any, wanted: str) -> ValueError:
    """The ValueError for an argument of the wrong type; ``wanted`` says what to give."""
    return ValueError(f"{name}={value!r} is of type {type(value).__name__}. Give {wanted}.")
