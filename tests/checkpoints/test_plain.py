"""State that could not be read again is named, with the keys that lead to it."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_wlb.checkpoints import plain


@dataclass
class State:
    steps: int


@pytest.mark.parametrize(
    ("state", "where", "kind"),
    [
        ({"a": {"b": [1, np.float64(2)]}}, "['a']['b'][1]", "numpy.float64"),
        ({"a": (np.arange(2),)}, "['a'][0]", "numpy.ndarray"),
        ({"a": Path()}, "['a']", f"{type(Path()).__module__}.PosixPath"),
        ({"a": timedelta(1)}, "['a']", "datetime.timedelta"),
        ({"a": State(1)}, "['a']", f"{__name__}.State"),
        ({"a": deque([1])}, "['a']", "collections.deque"),
        ({"a": lambda: 1}, "['a']", "builtins.function"),
        ({"a": {np.int64(1): 1}}, "the key 1 in ['a']", "numpy.int64"),
    ],
)
def test_what_could_not_be_read_is_named(state, where, kind):
    said = f"cannot hold {where}: an object of {kind} could"
    with pytest.raises(ValueError, match=re.escape(said)):
        plain.check(state)


def test_what_can_be_read_passes():
    plain.check(
        {
            "plain": [None, True, 1, 1.0, 1j, "text", b"bytes", (), {}],
            7: torch.ones(2),
            "more": [torch.float32, torch.Size((1,)), OrderedDict(a=1), {1, 2}],
        }
    )
