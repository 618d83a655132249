"""State that can be read again by ``torch.load(weights_only=True)``: plain types and tensors.

``torch.save`` writes any object, and most of what it writes is refused when it is read, since
making an object again may run code. A run would notice when it resumes. So state is looked through
before it is saved: built-in types pass at once, and anything else is written and read on trial.

Cost: microseconds for each entry, and a copy in memory of each that is of no built-in type.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


def check(state: Any) -> None:
    """Refuse state that could not be read again.

    Args:
        state: dictionaries, lists and tuples of values.

    Raises:
        ValueError: naming the keys that lead to the value, and its class.
    """
    for where, value in _leaves(state, ""):
        if type(value) not in _PLAIN and not _readable(value):
            kind = type(value)
            raise ValueError(
                f"A checkpoint cannot hold {where}: an object of {kind.__module__}.{kind.__name__}"
                " could not be read again without running code. Keep plain Python values or tensors"
                " in the state instead: float(x), str(path), x.total_seconds(),"
                " dataclasses.asdict(x)."
            )


def _leaves(state: Any, where: str) -> Iterator[tuple[str, Any]]:
    if type(state) is dict:
        for key, value in state.items():
            yield f"the key {key} in {where or 'it'}", key
            yield from _leaves(value, f"{where}[{key!r}]")
    elif type(state) in (list, tuple):
        for index, value in enumerate(state):
            yield from _leaves(value, f"{where}[{index}]")
    elif not isinstance(state, torch.Tensor):
        yield where, state


def _readable(value: Any) -> bool:
    written = io.BytesIO()
    try:
        torch.save(value, written)
        written.seek(0)
        torch.load(written, map_location="cpu", weights_only=True)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True
