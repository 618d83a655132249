"""Other people's code runs without what its package imports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import peers


def test_a_file_runs_without_what_its_package_imports(tmp_path: Path) -> None:
    """Named files are read, other modules are empty, and nothing of the package stays imported."""
    folder = tmp_path / "Megatron-LM" / "megatron"
    folder.mkdir(parents=True)
    (folder / "helper.py").write_text("import megatron.gone\nTWO = 2\n")
    (folder / "main.py").write_text(
        "from megatron.absent import Base\nfrom megatron.helper import TWO\n"
        "class Mine(Base):\n    value = TWO\n"
    )
    module = peers.module_of("megatron", "megatron.main", ("megatron.helper",), clones=tmp_path)
    assert module.Mine.value == 2
    assert not [name for name in sys.modules if name.startswith("megatron")]
    with pytest.raises(peers.Missing, match="Megatron-LM"):
        peers.module_of("megatron", "megatron.other", clones=tmp_path)
