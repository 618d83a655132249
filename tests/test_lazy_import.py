"""The package without torch and Lightning, and with Lightning before or after it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_wlb

PACKAGE = Path(lightning_wlb.__file__).parent

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

NAMES = {"torch", "lightning", "torchdata", "transformers", "matplotlib", "pulp", "pyarrow"}
NAMES |= {"platformdirs", "filelock", "rich", "yaml", "jsonargparse", "tokenizers"}
sys.meta_path.insert(0, Blocked())
"""


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numpy_alone_plans() -> None:
    said = run(
        BLOCKED
        + """
import lightning_wlb
assert not [name for name in sys.modules if name.startswith("lightning_wlb.")]
assert "numpy" not in sys.modules
from lightning_wlb import plan_step
step = plan_step([5, 3, 900, 4], ranks=2, max_tokens=1000, model="7b")
print(step.micro_batches)
for room in ("mesh", "plan", "cost.profile", "schedule.simulator", "sharding", "prediction.step",
             "planning.planner", "mesh_search.search", "heterogeneous.planning.pool_search"):
    __import__("lightning_wlb." + room)
for name in ("WLBStrategy", "HuggingFaceModule"):
    try:
        getattr(lightning_wlb, name)
    except ModuleNotFoundError as error:
        print(error)
from lightning_wlb.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
"""
    )
    assert "[[[2]], [[0, 1, 3]]]" in said
    assert "WLBStrategy needs lightning: pip install 'lightning-wlb[train]'" in said
    assert "HuggingFaceModule needs" in said
    assert "Compare packings" in said


def test_the_strategy_is_registered_whichever_comes_first() -> None:
    """Each order in a fork of an interpreter that has what takes long of Lightning's imports."""
    said = run(
        "import os, sys, torch._dynamo, torchmetrics\n"
        "for first, second in ('lightning', 'lightning_wlb'), ('lightning_wlb', 'lightning'):\n"
        "    if os.fork():\n"
        "        assert os.wait()[1] == 0, first\n"
        "        continue\n"
        "    assert not {'lightning', 'lightning_wlb'} & set(sys.modules)\n"
        "    __import__(first)\n"
        "    __import__(second)\n"
        "    import lightning\n"
        "    assert 'lightning_wlb.strategy.wlb' not in sys.modules\n"
        "    assert not [f for f in sys.meta_path if type(f).__module__ == 'lightning_wlb']\n"
        "    given = {'accelerator': 'cpu', 'devices': 1, 'logger': False}\n"
        "    trainer = lightning.Trainer(strategy='wlb', **given)\n"
        "    import lightning_wlb\n"
        "    assert isinstance(trainer.strategy, lightning_wlb.WLBStrategy)\n"
        "    print(type(trainer.strategy).__name__, 'after', first)\n"
        "    break\n"
    )
    for first in ("lightning", "lightning_wlb"):
        assert f"WLBStrategy after {first}" in said.splitlines()


def test_every_public_name_is_there() -> None:
    typed = [
        (str(node.module).removeprefix("lightning_wlb."), each.name)
        for node in ast.walk(ast.parse(Path(lightning_wlb.__file__).read_text()))
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.asname == each.name
    ]
    homes = [(home, name) for home, names in lightning_wlb._HOMES.items() for name in names]
    assert sorted(typed) == sorted(homes)
    assert set(lightning_wlb.__all__) <= set(dir(lightning_wlb))
    for name in lightning_wlb.__all__:
        assert getattr(lightning_wlb, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = lightning_wlb.Nothing


def test_mistakes_on_the_command_line_load_no_torch() -> None:
    said = run(
        "import sys\n"
        "from lightning_wlb.cli.main import main\n"
        "plan = '--model 7b --mesh 1,1,1,1 --context-window 64 --profile h100'.split()\n"
        "assert main(['plan', '--lengths', 'missing.txt', *plan]) == 2\n"
        "assert main(['tokenize', 'missing.jsonl', 'out', '--tokenizer', 'none.json']) == 2\n"
        "assert main(['export', 'missing', 'out']) == 2\n"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)\n"
    )
    assert said.split() == ["False", "False"]
