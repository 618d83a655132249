"""The link between two processes, of nobody else's modules; none where are no two devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_wlb.profiling.link_speed import measure_link


def test_one_gpu_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert measure_link(torch.device("cuda", 0)) is None


def test_a_link_is_measured_without_modules_of_the_working_folder(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("multiprocessing", "signal", "selectors"):
        (folder / f"{name}.py").write_text("open('ran', 'w').close()\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\n"
        "from lightning_wlb.profiling.link_speed import measure_link\n"
        "if __name__ == '__main__':\n"
        "    assert measure_link(torch.device('cpu')).bytes_per_second > 0\n"
        "    assert 'PYTHONSAFEPATH' not in os.environ\n"
    )
    subprocess.run([sys.executable, script], cwd=folder, check=True, timeout=200)
    assert not (folder / "ran").exists()
