"""What a user passed, as plain Python, or a ValueError with the value and the remedy.

Numbers of numpy and torch count as numbers and become Python's: settings go into JSON,
fingerprints and checkpoints of plain types. True is no number, and 32.0 no whole one: where they
stand, something else was meant.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A whole number.

    Args:
        name: of the argument.
        value: as it was passed.
        least: smallest value allowed.

    Raises:
        ValueError: another type, or a value below ``least``.
    """
    wanted = "a whole number" if least is None else f"a whole number of at least {least}"
    try:
        number = None if _is_truth(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name}={value!r} is of type {_kind(value)}. Give {wanted}.")
    if least is not None and number < least:
        raise ValueError(f"{name}={value!r}, but it must be at least {least}. Give {wanted}.")
    return number


def wholes(name: str, value: Any, least: int | None = None) -> tuple[int, ...]:
    """Whole numbers in a sequence; ``least`` as in :func:`whole`.

    Raises:
        ValueError: no sequence, or something else in it.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(
            f"{name}={value!r} is of type {_kind(value)}. Give a sequence of whole numbers."
        )
    return tuple(whole(name, each, least) for each in value)


def number(
    name: str, value: Any, least: float = -math.inf, most: float = math.inf, above: bool = False
) -> float:
    """A finite number.

    Args:
        name: of the argument.
        value: as it was passed.
        least: smallest value allowed, or with ``above`` the largest that is not.
        most: largest value allowed.
        above: whether ``least`` itself is too small.

    Raises:
        ValueError: another type, or a value out of range.
    """
    wanted = (
        "a number" if least == -math.inf else f"a number {'above' if above else 'from'} {least:g}"
    )
    if most < math.inf:
        wanted += f" to {most:g}"
    if _is_truth(value) or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"{name}={value!r} is of type {_kind(value)}. Give {wanted}.")
    result = float(value)
    if not (math.isfinite(result) and least <= result <= most) or (above and result == least):
        raise ValueError(f"{name}={value!r} is out of range. Give {wanted}.")
    return result


def flag(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        ValueError: another type; a text like ``"false"`` would count as true.
    """
    if not _is_truth(value):
        raise ValueError(f"{name}={value!r} is of type {_kind(value)}. Give True or False.")
    return bool(value)


def choice(name: str, value: Any, known: Iterable[str]) -> str:
    """One of the names that are known.

    Raises:
        ValueError: any other value; the message lists them.
    """
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(names)}. Choose one of these.")
    return value


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _kind(value: Any) -> str:
    return type(value).__name__
