"""A stranger's checkpoint: whatever reads it, nothing of it runs.

Each is a real checkpoint with a pickle put in that makes a folder when it is read as pickles are:
in the shards' metadata, in a shard's entry that is not a tensor, in ``meta.pt``. Its manifest fits,
since whoever writes a checkpoint writes the manifest too.
"""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from lightning_wlb.checkpoints.stored_checkpoint import StoredCheckpoint
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.checkpoints.small_checkpoints import list_anew, poison
from tests.ranks import RankFailed, run_ranks
from tests.soak.processes import run
from tests.soak.training import Run
from tests.strategy import harness

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]
MESH = (2, 2, 1, 1)
NAME = "last-step=6.ckpt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("whole")
    assert run(Run(str(home), MESH, steps=6), 120).code == 0
    return home / "checkpoints" / NAME


def fit(path: Path) -> None:
    shutil.copytree(path, path.parent / "run/checkpoints" / NAME)
    if run(Run(str(path.parent / "run"), MESH, resume=True), 60).code != 0:
        raise RankFailed("the run has ended with an error")


def validate_in_a_rank(rank: int, path: Path) -> None:
    data = harness.data(harness.SMALL, validation_documents=4)
    trainer = harness.trainer(WLBStrategy(), 1)
    trainer.validate(harness.module(harness.SMALL), data, ckpt_path=path, verbose=False)


def validate(path: Path) -> None:
    run_ranks(validate_in_a_rank, 1, path, process_group=False)


def load(path: Path) -> None:
    LanguageModule.load_from_checkpoint(path)


def export(path: Path) -> None:
    """As ``lightning-wlb export`` reads it."""
    stored = StoredCheckpoint(path)
    stored.read(stored.names)


READERS = (fit, validate, load, export)


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("way", ["metadata", "entry", "rest"])
def test_nothing_runs(way: str, read: Callable[[Path], None], whole: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole, tmp_path / NAME))
    made = tmp_path / "made"
    poison(path, way, made)
    try:
        read(path)
        refused = False
    except (Exception, SystemExit):
        refused = True
    assert not made.exists(), "it ran"
    # Weights are read without the optimizer's settings.
    assert refused or way == "entry"


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_the_same_is_read_where_nothing_was_put(read, whole, tmp_path):
    path = Path(shutil.copytree(whole, tmp_path / NAME))
    list_anew(path)
    read(path)


@pytest.mark.parametrize("way", ["metadata", "entry", "rest"])
def test_read_as_pickles_are_it_would_run(way: str, whole: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole, tmp_path / NAME))
    made = tmp_path / "made"
    poison(path, way, made)
    if way == "rest":
        torch.load(path / "meta.pt", weights_only=False)
    elif way == "metadata":
        pickle.loads((path / ".metadata").read_bytes())
    else:
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        name = next(name for name in stored if name.endswith(".lr"))
        with pytest.raises(CheckpointException):  # after it has run: it is no tensor file
            dcp.load({name: None}, checkpoint_id=path, no_dist=True)
    assert made.exists()
