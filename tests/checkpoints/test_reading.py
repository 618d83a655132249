"""What was damaged, or made to do harm, is refused; what is whole is read."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_wlb.checkpoints import manifest, reading
from lightning_wlb.checkpoints.stored_checkpoint import StoredCheckpoint
from tests.checkpoints.small_checkpoints import load, model, poison, save
from tests.ranks import run_ranks

FILES = ("__0_0.distcp", ".metadata", "meta.pt", "manifest.json")


@pytest.fixture(scope="module")
def saves(tmp_path_factory) -> tuple[Path, Path]:
    """Checkpoints of two steps of a run."""
    folder = tmp_path_factory.mktemp("saves")
    for value in (3.0, 6.0):
        save(folder / f"{value:g}.ckpt", value)
    return folder / "6.ckpt", folder / "3.ckpt"


@settings(
    max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(FILES),
    damage=st.sampled_from(("flip", "truncate", "delete", "swap", "append")),
    where=st.integers(min_value=0, max_value=10**9),
)
def test_no_damage_gives_another_state(name, damage, where, saves, tmp_path):
    whole, other = saves
    path = tmp_path / "damaged.ckpt"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    file = path / name
    content = file.read_bytes()
    at = where % len(content)
    if damage == "flip":
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << where % 8]) + content[at + 1 :])
    elif damage == "truncate":
        file.write_bytes(content[:at])
    elif damage == "delete":
        file.unlink()
    elif damage == "swap":
        shutil.copyfile(other / name, file)
    else:
        file.write_bytes(content + b"\0")
    with pytest.raises((ValueError, FileNotFoundError), match=r"damaged\.ckpt") as info:
        load(path)
    if not (damage == "delete" and name == "meta.pt"):  # without it, it is no checkpoint
        assert isinstance(info.value, manifest.Damaged)
        with pytest.raises(ValueError, match=r"damaged\.ckpt"):
            StoredCheckpoint(path)
        with pytest.raises(manifest.Damaged):
            manifest.check(path)


def test_of_each_rank_meta_pt_is_of_the_save_that_rank_0_sees(saves, tmp_path, monkeypatch):
    """Another node may still see the file of the save before, and rank 0 alone compares it."""
    path = Path(shutil.copytree(saves[0], tmp_path / "run.ckpt"))
    shutil.copyfile(saves[1] / "meta.pt", path / "meta.pt")
    monkeypatch.setattr(manifest, "check_files", lambda *_: None)
    with pytest.raises(manifest.Damaged, match=r"meta\.pt is of another save than manifest\.json"):
        load(path)


def load_from_disks_of_their_own(rank: int, disks: list[Path], problem: str) -> None:
    """Each rank reads below its own working folder, and names the same path."""
    os.chdir(disks[rank])
    with pytest.raises(manifest.Damaged, match=problem):
        load(Path("6.ckpt"))
    os.chdir(disks[0])
    assert load(Path("6.ckpt")) == 6.0


@pytest.mark.parametrize("exchanged", [False, True], ids=["damaged", "of another save"])
def test_a_copy_that_another_rank_sees_is_compared_too(exchanged, saves, tmp_path):
    """As where a checkpoint was copied to a disk of each node: rank 0's copy vouches for none."""
    disks = [saves[0].parent, tmp_path]
    shard = Path(shutil.copytree(saves[0], tmp_path / "6.ckpt")) / "__0_0.distcp"
    content, weight = shard.read_bytes(), model(6.0)[0][0].weight.detach().numpy().tobytes()
    assert weight in content
    shard.write_bytes(
        (saves[1] / shard.name).read_bytes() if exchanged else content.replace(weight, bytes(24))
    )
    assert shard.stat().st_size == len(content)
    problem = r"rank 1 .*6\.ckpt is damaged: the content of __0_0.distcp is not what was written"
    run_ranks(load_from_disks_of_their_own, 2, disks, problem)


def test_a_checkpoint_without_a_manifest_is_damaged(saves, tmp_path):
    path = tmp_path / "run.ckpt"
    shutil.copytree(saves[0], path)
    (path / manifest.NAME).unlink()
    rest = torch.load(path / "meta.pt", weights_only=True)
    assert len(rest.pop("WLBStrategy")["save"]) == 32
    torch.save(rest, path / "meta.pt")
    with pytest.raises(manifest.Damaged, match=r"run\.ckpt is damaged: manifest\.json is missing"):
        load(path)


@pytest.mark.parametrize("way", ["metadata", "rest", "entry"])
def test_nothing_that_a_checkpoint_holds_is_run(way, saves, tmp_path):
    path, made = tmp_path / "run.ckpt", tmp_path / "made"
    shutil.copytree(saves[0], path)
    poison(path, way, made)
    with pytest.raises(ValueError, match=r"run\.ckpt|UnpicklingError"):
        load(path)
    if way == "entry":
        StoredCheckpoint(path).read(["0.weight"])  # weights do not need the entry
    else:
        with pytest.raises(ValueError, match=r"run\.ckpt"):
            StoredCheckpoint(path)
    assert not made.exists()


def test_a_folder_that_another_save_replaces_while_it_is_read_is_refused(
    saves, tmp_path, monkeypatch
):
    """Each file is whole, but of another step: the weights of one and the counts of another."""
    last, compared = tmp_path / "last.ckpt", threading.Event()
    check_files, read = manifest.check_files, reading.dcp.load

    def lead_to(save: Path) -> None:
        last.unlink(missing_ok=True)
        last.symlink_to(save)

    def comparing(folder: Path, listed: manifest.Manifest, names: list[str]) -> None:
        check_files(folder, listed, names)
        if "__0_0.distcp" in names:
            compared.set()

    def reading_late(*args: Any, **options: Any) -> None:
        assert compared.wait(60)
        lead_to(saves[1])
        read(*args, **options)

    lead_to(saves[0])
    stored = StoredCheckpoint(last)
    stored.read(stored.names)
    lead_to(saves[1])
    with pytest.raises(manifest.Damaged, match=r"last\.ckpt was replaced while it was read"):
        stored.read(stored.names)
    lead_to(saves[0])
    monkeypatch.setattr(manifest, "check_files", comparing)
    monkeypatch.setattr(reading.dcp, "load", reading_late)
    with pytest.raises(manifest.Damaged, match=r"last\.ckpt was replaced while it was read"):
        load(last)
