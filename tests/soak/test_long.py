"""Runs that are killed again and again, and a run that is long."""

import itertools
import random
import statistics
import time
from pathlib import Path

import pytest

from tests.soak import table
from tests.soak.plants import session
from tests.soak.processes import kill, losses, run, states, tail
from tests.soak.training import Run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]
KILLS = 20
STEPS = 1000
MESHES = {"pipeline": (2, 2, 1, 1), "context": (2, 1, 2, 1), "tensor": (2, 1, 1, 2)}


class Killer:
    """Kills a rank, the launcher or everything, at a random moment after training has begun."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder = folder
        self.delay = chance.uniform(0.0, 4.0)
        self.victim = chance.choice([0, 1, 2, 3, None])
        self.at: float | None = None
        self.done = False
        (folder / "began").unlink(missing_ok=True)

    def __call__(self, number: int) -> None:
        if self.at is None and (self.folder / "began").exists():
            self.at = time.monotonic() + self.delay
        if self.done or self.at is None or time.monotonic() < self.at:
            return
        self.done = True
        if self.victim is None:
            for pid in session(number):
                kill(pid)
        else:
            kill(int((self.folder / f"pid-{self.victim}").read_text()))


@pytest.mark.parametrize("mesh", list(MESHES))
def test_a_chain_of_kills_changes_no_bit(mesh: str, tmp_path: Path) -> None:
    chance = random.Random(mesh)
    options = {"name": "last", "save_every": 2, "validate_every": 25}
    options["strategy"] = {"async_save": True}
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    for number in range(KILLS):
        broken.mkdir(exist_ok=True)
        killer = Killer(broken, chance)
        # Longer than any of the runs may last.
        endless = Run(str(broken), MESHES[mesh], steps=10**6, resume=number > 0, **options)
        ending = run(endless, 100, meanwhile=killer)
        assert killer.done, tail(broken / "rank-0.log")
        assert not ending.left, (number, killer.victim, ending.left)
    last = max(losses(broken)) + 5
    assert run(Run(str(broken), MESHES[mesh], last, resume=True, **options), 100).code == 0
    assert run(Run(str(whole), MESHES[mesh], last, **options), 300).code == 0
    assert losses(broken) == losses(whole)
    assert states(broken) == states(whole)
    # What the killed left is gone, but for what another run might still write.
    assert {path.name for path in (broken / "checkpoints").iterdir()} <= {"last.ckpt", ".partial"}
    table.write_figure(
        f"{KILLS} kills in a chain, saving in the background, {mesh} parallel × data parallel",
        f"{last} steps, bit for bit the unbroken run's",
    )


def test_a_long_run_takes_no_more_and_gets_no_slower(tmp_path: Path) -> None:
    sizes = {"save_every": 50, "validate_every": 100, "repeats": 25}
    options = Run(str(tmp_path), MESHES["pipeline"], STEPS, name="last", **sizes)
    assert run(options, 1800).code == 0
    worst = (-1.0, 0.0)
    for rank in range(4):
        rows = [line.split() for line in (tmp_path / f"usage-{rank}").read_text().splitlines()]
        pages = {int(step): int(used) for step, used, *_ in rows}
        descriptors = {int(step): int(used) for step, _, used, *_ in rows}
        seconds = [float(used) for *_, used, _ in rows]
        steps = [after - before for before, after in itertools.pairwise(seconds)]
        early, late = (statistics.median(steps[at : at + 200]) for at in (200, STEPS - 201))
        grown = pages[STEPS] / pages[300] - 1
        worst = max(worst, (grown, late / early - 1))
        assert grown < 0.01
        # At the same place of an epoch: workers and their pipes come and go.
        assert descriptors[STEPS] <= descriptors[300]
        assert late < 1.1 * early
    table.write_figure(
        f"{STEPS} steps on four ranks, the rank that grows most",
        f"memory {worst[0]:+.2%} since step 300, CPU time of a step {worst[1]:+.1%}",
    )
