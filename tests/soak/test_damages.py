"""Damaged checkpoints: none is taken for another state, and the newest undamaged one is used.

The checkpoints are those of a run of four ranks; what becomes of them is tried in one process.
"""

import random
import shutil
from pathlib import Path

import pytest
import torch

from lightning_wlb.checkpoints import sharded
from lightning_wlb.strategy.resuming import candidates_in, load_first
from tests.soak import table
from tests.soak.processes import run, tail
from tests.soak.training import Run
from tests.strategy import harness

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of every damage
]
DAMAGES = 200
MESH = (2, 2, 1, 1)


def damage(kind: str, chance: random.Random, path: Path, other: Path) -> None:
    """Damage a file of a checkpoint; ``other`` is the file of that name of an older one."""
    content = bytearray(path.read_bytes())
    size = len(content)
    if kind == "flip":  # one bit
        content[chance.randrange(size)] ^= 1 << chance.randrange(8)
    elif kind == "truncate":
        del content[chance.choice([0, size - 1, chance.randrange(size)]) :]
    elif kind == "zero":  # a block that never reached the disk
        start = chance.randrange(0, size, 512)
        content[start : start + 512] = bytes(len(content[start : start + 512]))
    elif kind == "append":
        content += chance.randbytes(chance.randrange(1, 100))
    elif kind == "older":
        content = bytearray(other.read_bytes())
    elif kind == "neighbour":  # another file of the same checkpoint, under this name
        others = [each for each in path.parent.iterdir() if each != path]
        content = bytearray(chance.choice(others).read_bytes())
    elif kind == "extra":  # a further file, named like a shard
        path = path.parent / f"__{chance.randrange(4, 9)}_0.distcp"
        content = bytearray(other.read_bytes())
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind != "delete":
        path.write_bytes(content)


KINDS = ("flip", "flip", "flip", "truncate", "zero", "append", "delete", "older", "neighbour",
         "folder", "extra")  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the checkpoints of steps 3 and 6 of a run."""
    home = tmp_path_factory.mktemp("whole")
    assert run(Run(str(home), MESH), 120).code == 0
    return home / "checkpoints"


class State:
    """A module and its optimizer in this process, into which checkpoints are read."""

    def __init__(self) -> None:
        self.module = harness.module(harness.SMALL).double()
        self.module.configure_model()
        self.module.double()
        self.optimizer = self.module.configure_optimizers()

    def load(self, path: Path) -> int:
        rest = sharded.load(path, self.module, [self.optimizer], {})
        return int(rest["global_step"])

    def values(self) -> list[torch.Tensor]:
        return [
            value.clone()
            for parameter in self.module.parameters()
            for value in (parameter.detach(), *self.optimizer.state[parameter].values())
        ]


def step_of(path: Path) -> int:
    return int(path.stem.partition("=")[2])


def test_no_damage_is_accepted(checkpoints: Path, tmp_path: Path) -> None:
    state = State()
    whole = {}
    for path in checkpoints.glob("*.ckpt"):
        assert state.load(path) == step_of(path)
        whole[step_of(path)] = state.values()
    assert not all(map(torch.equal, whole[3], whole[6]))
    files = sorted(path.name for path in (checkpoints / "last-step=6.ckpt").iterdir())
    refused, wrong = 0, []
    for number in range(DAMAGES):
        chance = random.Random(number)
        # Every file by every kind of damage first, then by chance.
        kind = KINDS[number % len(KINDS)]
        name = files[number // len(KINDS) % len(files)] if number < 99 else chance.choice(files)
        home = Path(shutil.copytree(checkpoints, tmp_path / "damaged"))
        newest = home / "last-step=6.ckpt"
        damage(kind, chance, newest / name, home / "last-step=3.ckpt" / name)
        said = f"{kind} of {name} ({number})"
        try:
            path, step = load_first(candidates_in(home, fitting=True), state.load)
        except Exception as error:
            wrong.append(f"{said}: {type(error).__name__}: {error}")
        else:
            same = all(map(torch.equal, state.values(), whole[step]))
            if step != step_of(path) or not same:
                wrong.append(f"{said}: {path.name} of step {step}, same state: {same}")
            refused += step == 3
        shutil.rmtree(home)
    assert wrong == []
    # What changes nothing (a further file, a manifest's white space) may be passed over.
    assert refused > 0.8 * DAMAGES
    table.write_figure(
        f"{DAMAGES} damages of a checkpoint of four ranks, an older one beside it",
        f"0 read as another state; {refused} refused, and the older one used",
    )


@pytest.mark.parametrize("kind", ["flip", "delete"])
def test_a_run_goes_on_from_the_newest_undamaged_one(kind, checkpoints, tmp_path):
    home = Path(shutil.copytree(checkpoints, tmp_path / "checkpoints"))
    newest, older = (home / f"last-step={step}.ckpt/__3_0.distcp" for step in (6, 3))
    damage(kind, random.Random(0), newest, older)
    assert run(Run(str(tmp_path), MESH, resume=True), 60).code == 0
    assert (tmp_path / "began").read_text() == "3"
    log = (tmp_path / "rank-0.log").read_text()
    assert "last-step=6.ckpt is damaged" in log, tail(tmp_path / "rank-0.log")
