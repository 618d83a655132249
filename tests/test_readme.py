"""The README's code runs when it is pasted into a file."""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.demo import caption
from benchmarks.one_process import REFERENCE

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def example() -> str:
    """The only block of Python in the README."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return block


def test_the_demos_figures_are_those_of_its_kept_runs():
    """``python -m benchmarks.demo`` prints what must stand there."""
    result = json.loads((ROOT / "benchmarks/results/demo.json").read_text())
    assert caption(result) in " ".join((ROOT / "docs/guide/start.md").read_text().split())


def test_it_is_ten_lines_or_so():
    assert len([line for line in example().splitlines() if line.strip()]) <= 14


def test_it_runs_on_two_ranks(tmp_path):
    code, replaced = re.subn(r"max_steps=\d+", "max_steps=3", example())
    assert replaced == 1
    code, replaced = re.subn(r"context_window=\d+", "context_window=512", code)
    assert replaced == 1
    # Both ranks share the cores evenly, or one crowds out the other.
    code += 'import torch\nprint(f"threads {torch.get_num_threads()} of rank", flush=True)\n'
    # The ranks that the first Trainer has started serve a second one, as in a demo of many.
    code += 'given = {"accelerator": "cpu", "devices": 2, "logger": False, "max_steps": 1}\n'
    code += 'L.Trainer(strategy="wlb", enable_checkpointing=False, **given).fit(model, data)\n'
    (tmp_path / "train.py").write_text(code)
    run = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "`max_steps=3` reached" in run.stderr
    assert "`max_steps=1` reached" in run.stderr
    assert "imbalance, data level" in run.stdout
    assert (tmp_path / "lightning_logs/version_0/imbalance.png").stat().st_size > 0
    threads = re.findall(r"threads (\d+) of rank", run.stdout)
    assert len(threads) == 2
    assert len(set(threads)) == 1


def test_what_one_process_gains_is_what_its_kept_runs_say():
    turns = json.loads((ROOT / "benchmarks/results/one_process.json").read_text())["turns"]
    rounds = turns["64,8000"]
    gains = [median(each[way] / each[REFERENCE] for each in rounds) for way in ("auto", "original")]
    least, most = sorted(f"{gain:.2f}" for gain in gains)
    said = f"trains {least} to {most} times as many tokens per processor second"
    text = " ".join(README.read_text().split())
    assert said in text
    assert f"(medians of {['no', 'one', 'two', 'three'][len(rounds)]} rounds;" in text


def test_the_first_screen_is_two_sentences_a_picture_and_two_commands():
    first = README.read_text().split("\n## ")[0]
    _, sentences, picture, caption, commands, *_ = first.split("\n\n")
    assert len(re.findall(r"\.(?=\s|$)", sentences)) == 2
    assert picture.startswith("![")
    assert caption.startswith("*")
    assert "\n" not in caption.strip()
    lines = commands.replace("\\\n", "").strip("`\n").splitlines()
    assert len([line for line in lines if not line.startswith("#")]) == 2


def test_the_landing_page_has_a_picture_three_commands_and_when_not():
    page = (ROOT / "docs/index.md").read_text()
    assert page.count("![") == 1
    assert page.index("![") < page.index("## For whom") < page.index("## When not")
    block, *_ = re.findall(r"\n```\n(.*?)```", page, re.DOTALL)
    commands = block.replace("\\\n", "").splitlines()
    assert [line.split()[:2] for line in commands] == [
        ["lightning-wlb", name] for name in ("tokenize", "plan", "fit")
    ]
