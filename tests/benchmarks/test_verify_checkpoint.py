"""Both ways of reading are measured, from memory and from the disk."""

import os

import pytest

from benchmarks.verify_checkpoint import measure


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs to make the system forget")
def test_each_way_is_measured(tmp_path):
    rows = measure(tmp_path, layers=1, repeats=1)
    assert [(row["files"], row["verified"]) for row in rows] == [
        ("warm", False),
        ("warm", True),
        ("cold", False),
        ("cold", True),
    ]
    assert all(row["seconds"] > 0 for row in rows)
