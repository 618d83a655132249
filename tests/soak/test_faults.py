"""Faults in runs of four ranks: each ends, or goes on, as promised, and nothing is left behind.

A row of the table in docs/reliability.md for each fault of :data:`.faults.FAULTS`; a cell for each
mesh, without and with ``ModelCheckpoint(save_on_exception=True)``. What runs here is written there.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lightning_wlb.checkpoints import atomic_folders
from tests.soak import table
from tests.soak.faults import CRASHES, FAULTS, Fault
from tests.soak.processes import losses, run, states, tail
from tests.soak.training import Run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]
MESHES = {"pipeline": (2, 2, 1, 1), "context": (2, 1, 2, 1)}
STEPS = 7


@cache
def unbroken(mesh: str) -> tuple[dict[int, str], list[str]]:
    with TemporaryDirectory() as folder:
        assert run(Run(folder, MESHES[mesh], STEPS), 120).code == 0
        return losses(Path(folder)), states(Path(folder))


@contextmanager
def file_system(folder: Path) -> Iterator[None]:
    """A file system of 8 MB at a folder."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("root")
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "soak", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def saved(folder: Path) -> int:
    """The step of the newest checkpoint that is there; 0 for none."""
    names = [path.name for path in (folder / "checkpoints").glob("*.ckpt")]
    return max([int(re.findall(r"step=(\d+)", name)[0]) for name in names], default=0)


@pytest.mark.parametrize("asked", [False, True], ids=["plain", "save_on_exception"])
@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("fault", list(FAULTS.values()), ids=list(FAULTS))
def test_a_fault(fault: Fault, mesh: str, asked: bool, tmp_path: Path) -> None:
    column = table.COLUMNS[2 * list(MESHES).index(mesh) + asked]
    if not fault.mounted:
        broken(fault, mesh, asked, tmp_path, column)
        return
    with file_system(tmp_path / "checkpoints"):
        broken(fault, mesh, asked, tmp_path, column)


def broken(fault: Fault, mesh: str, asked: bool, folder: Path, column: str) -> None:
    options = Run(str(folder), MESHES[mesh], STEPS, fault.key, asked, timeout=fault.timeout)
    table.write_outcome(fault, column, "fails")
    ending = run(options, fault.within, interpreters=fault.interpreters)
    logs = {rank: folder / f"rank-{rank}.log" for rank in range(4)}
    said = "\n\n".join(f"rank {rank}:\n{tail(log)}" for rank, log in logs.items() if log.exists())
    marks = list(folder.glob("fired-[0-9]"))
    assert marks, f"the fault did not act\n{said}"
    assert not ending.left, f"still there: {ending.left}\n{said}"
    if fault.ends == "error":
        assert ending.code not in (0, None), said
    elif fault.ends != "dies":
        assert ending.code == 0, said
    failed = {rank for rank in fault.ranks if (folder / f"fired-{rank}").exists()}
    if fault.silent:
        failed = set(logs) - failed
    ends = [tail(logs[rank]) for rank in failed if logs[rank].exists()]
    heard = any if fault.silent else all
    assert not fault.says or heard(re.search(fault.says, end) for end in ends), said
    newest = saved(folder)
    if fault.saves != "either" and fault.step > 0:
        assert (newest > 3) == (fault.saves == "asked" and asked), f"saved: {newest}\n{said}"
    if fault.mounted:
        home = folder / "checkpoints"
        subprocess.run(["mount", "-o", "remount,rw", str(home)], check=True)
        (home / "filler").unlink(missing_ok=True)
    if fault.ends != "goes on" and newest:
        resumes(mesh, folder, newest)
    if fault.ends == "goes on":
        assert (losses(folder), states(folder)) == unbroken(mesh)
    outcome = {"goes on": "goes on"}.get(fault.ends, f"{ending.seconds:.1f} s")
    table.write_outcome(fault, column, outcome + (f", saves step {newest}" if newest > 3 else ""))


def resumes(mesh: str, folder: Path, newest: int, **options: Any) -> None:
    """From the newest checkpoint to the end, and every bit is the unbroken run's."""
    (folder / "losses").unlink()
    again = run(Run(str(folder), MESHES[mesh], STEPS, resume=True, **options), 60)
    said = tail(folder / "rank-0.log")
    assert again.code == 0, said
    assert int((folder / "began").read_text()) == newest, said
    want, ends = unbroken(mesh)
    assert losses(folder) == {step: loss for step, loss in want.items() if step > newest}
    assert states(folder) == ends


@pytest.mark.parametrize("background", [False, True], ids=["in_step", "in_background"])
@pytest.mark.parametrize("crash", CRASHES, ids=[crash.key for crash in CRASHES])
def test_a_kill_in_a_save(crash: Fault, background: bool, tmp_path: Path) -> None:
    """Kill -9 at every named point of a save that replaces the only checkpoint: nothing is lost."""
    options: dict[str, Any] = {"name": "last", "strategy": {"async_save": background}}
    ending = run(Run(str(tmp_path), MESHES["pipeline"], STEPS, crash.key, **options), 60)
    assert (tmp_path / "fired-0").exists(), tail(tmp_path / "rank-0.log")
    assert not ending.left, ending.left
    points = atomic_folders.POINTS
    late = points.index(crash.place.removeprefix("save: ")) >= points.index("named")
    resumes("pipeline", tmp_path, 6 if late else 3, **options)
