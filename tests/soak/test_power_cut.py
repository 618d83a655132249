"""A power cut at any moment of a save loses nothing that was saved."""

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks import ranks
from lightning_wlb.checkpoints import atomic_folders, manifest, sharded, writing
from tests.soak import table
from tests.soak.power import Disk, cut

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([*ranks.PRELOADED, "pytest", "tests.soak.test_power_cut"])
CUTS = 60


def model(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module with an optimizer, all of whose numbers say the step."""
    module = nn.Linear(96, 96)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.data.fill_(step)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in module.parameters():
        parameter.data.fill_(step)
        optimizer.state[parameter]["exp_avg"].fill_(step)
    return module, optimizer


def save(home: Path, pipe: Connection, point: str, how: str, synchronises: bool) -> None:
    """Save steps 1, 2, ... and tell when each is saved; cut the power at a point of step 2."""
    step = 1

    def reached(name: str) -> None:
        if step == 2 and name == point:
            cut(home)

    with (
        mock.patch.object(atomic_folders, "reached", reached),
        mock.patch.object(
            atomic_folders, "_exchange", _none if how == "two renames" else _exchange
        ),
        mock.patch.object(os, "fsync", os.fsync if synchronises else lambda _: None),
    ):
        while True:
            name = f"last-{step}.ckpt" if how == "a new name" else "last.ckpt"
            module, optimizer = model(step)
            writing.write(
                home / name, sharded.collect(module, [optimizer], {"global_step": step}, {})
            )
            pipe.send(step)
            step += 1
            if step > 3 and point:
                return


_exchange = atomic_folders._exchange


def _none(*_: Path) -> bool:
    return False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.close()


def saved_before_the_cut(
    disk: Disk, point: str, how: str, seconds: float | None = None, synchronises: bool = True
) -> int:
    """The last step that a process had saved when the power went; the disk is mounted again."""
    ours, theirs = context.Pipe(duplex=False)
    arguments = (disk.folder, theirs, point, how, synchronises)
    process = context.Process(target=save, args=arguments)
    process.start()
    theirs.close()
    steps = [ours.recv()] if seconds is not None else []
    if seconds is not None:
        time.sleep(seconds)
        cut(disk.folder)
    try:
        while ours.poll(60):
            steps.append(ours.recv())
    except EOFError:
        pass
    process.join(60)
    assert not process.is_alive()
    # What came through the pipe after the cut was saved before it, or the save lied.
    disk.restart()
    return max(steps)


def newest(home: Path) -> int:
    """The step of the newest checkpoint that verifies, and that holds this step's numbers."""
    found = [0]
    for path in (*home.glob("*.ckpt"), *home.glob(".old/*.ckpt")):
        try:
            manifest.check(path)
        except (OSError, ValueError):
            continue
        module, optimizer = model(0)
        step = sharded.load(path, module, [optimizer], {}, None)["global_step"]
        for parameter in module.parameters():
            assert torch.all(parameter == step)
            assert torch.all(optimizer.state[parameter]["exp_avg"] == step)
        found.append(step)
    return max(found)


WAYS = ("exchanged", "two renames", "a new name")


@pytest.mark.parametrize("point", atomic_folders.POINTS)
@pytest.mark.parametrize("how", WAYS)
def test_a_cut_at_a_point_of_a_save(how: str, point: str, disk: Disk) -> None:
    if point == "moved" and how != "two renames":
        return  # no save comes there
    saved = saved_before_the_cut(disk, point, how)
    if point in ("synchronised", "removed"):
        assert newest(disk.folder) == 2
    else:
        assert saved == 1
        assert newest(disk.folder) in (1, 2)


def test_cuts_at_any_moment(disk: Disk) -> None:
    for number in range(CUTS):
        chance = random.Random(number)
        how = WAYS[number % len(WAYS)]
        saved = saved_before_the_cut(disk, "", how, chance.uniform(0, 0.3))
        assert newest(disk.folder) in (saved, saved + 1), (number, how)
        disk.empty()
    table.write_figure(f"{CUTS} power cuts at random moments of saves", "no saved step lost")


def test_without_synchronisation_a_cut_loses_what_was_saved(disk: Disk) -> None:
    saved = saved_before_the_cut(disk, "removed", "exchanged", synchronises=False)
    assert newest(disk.folder) < max(saved, 2)
