"""The guide's loop without a Trainer runs, and goes on where it was."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

GUIDE = Path(__file__).parents[1] / "docs/guide/own_loop.md"


def loop() -> str:
    """The block of Python in the guide that makes a StepLoader."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "StepLoader(" in block]
    return block


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine the model's many small products wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_the_loop_without_a_trainer_resumes(tmp_path, monkeypatch, capsys) -> None:
    def run(steps: int) -> list[str]:
        code, replaced = re.subn(r"islice\(loader, \d+", f"islice(loader, {steps}", loop())
        assert replaced == 1
        code, replaced = re.subn(r"context_window=\d+", "context_window=64", code)
        assert replaced == 1
        exec(compile(code, "own_loop.md", "exec"), {})
        return capsys.readouterr().out.splitlines()

    (tmp_path / "unbroken").mkdir()
    monkeypatch.chdir(tmp_path / "unbroken")
    unbroken = run(4)
    assert [line.split(":")[0] for line in unbroken] == [f"step {number}" for number in range(4)]
    monkeypatch.chdir(tmp_path)
    assert run(2) + run(2) == unbroken
