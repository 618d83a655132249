"""Loops without a Trainer: a position that outlives the loader, its process and its mesh."""

import multiprocessing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_wlb.data.loader import StepLoader
from tests import ranks  # noqa: F401  (what a new process has imported already)
from tests.data.test_loader import DATA, content, dataset, epochs


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_plain_loop_resumes_with_the_batch_after_the_last_one_handed_out(workers, tmp_path):
    """From a file, with the state of any number of workers, which read ahead: all have the same."""
    unbroken = epochs(dataset(), 2)
    want = [content(batch) for batch in unbroken]
    end = [batch.plan.epoch for batch in unbroken].index(1)
    loader = StepLoader(dataset(), num_workers=workers)
    states = [loader.state_dict()]
    for _ in range(2):
        for batch in loader:
            assert loader.state_dict() == {"planner": batch.state}
            states.append(loader.state_dict())
    assert states == [{}, *({"planner": batch.state} for batch in unbroken)]
    torch.save(states, tmp_path / "states.pt")
    states = torch.load(tmp_path / "states.pt", weights_only=True)
    # Before the first step, inside the epoch, before and after its last batch, in the next one.
    for taken in (0, 4, end - 1, end, end + 1) if workers != 1 else (4, end):
        resumed = StepLoader(dataset(), num_workers=workers)
        resumed.load_state_dict(states[taken])
        rest = epochs(resumed, 2 if taken < end else 1)
        assert [content(batch) for batch in rest] == want[taken:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_was_left_goes_on_and_takes_its_workers_along(workers: int) -> None:
    unbroken = [content(batch) for batch in dataset()]
    loader = StepLoader(dataset(), num_workers=workers)
    first = []
    for batch in loader:
        first.append(batch)
        assert len(multiprocessing.active_children()) == workers
        if len(first) == 3:
            break
    del batch
    assert not multiprocessing.active_children(), "none outlives the loop"
    before = torch.random.get_rng_state()
    assert [content(batch) for batch in [*first, *loader]] == unbroken
    assert torch.equal(torch.random.get_rng_state(), before)
    # Back to where it was before.
    loader.load_state_dict({"planner": first[1].state})
    assert content(next(iter(loader))) == unbroken[2]
    loader.load_state_dict({})
    assert content(next(iter(loader))) == unbroken[0]


def test_fabric_saves_and_loads_the_loader(tmp_path: Path) -> None:
    unbroken = [content(batch) for batch in dataset()]
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = StepLoader(dataset(), num_workers=1)
    batches = list(islice(fabric.setup_dataloaders(loader), 3))
    fabric.save(tmp_path / "last.ckpt", {"loader": loader})
    resumed = StepLoader(dataset(), num_workers=2)
    fabric.load(tmp_path / "last.ckpt", {"loader": resumed})
    assert [content(batch) for batch in [*batches, *resumed]] == unbroken


def test_a_stateful_loader_of_the_users_own_resumes() -> None:
    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(dataset(), batch_size=None)

    first, second = loader(), loader()
    batches = list(islice(first, 3))
    second.load_state_dict(first.state_dict())
    assert [content(batch) for batch in [*batches, *second]] == [
        content(batch) for batch in dataset()
    ]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_a_loader_of_the_users_own_are_refused(kind: Any, workers: int) -> None:
    """Every epoch would be the first again."""
    with pytest.raises(MisconfigurationException, match=r"from the beginning.*StepLoader\(dataset"):
        next(iter(kind(dataset(), batch_size=None, num_workers=workers)))


def test_states_that_cannot_be_resumed_from_are_refused() -> None:
    loader = StepLoader(dataset())
    with pytest.raises(ValueError, match=r"_snapshot.* not that of a StepLoader"):
        loader.load_state_dict({"_snapshot": {}, "_iterator_finished": False})
    next(iter(loader))
    other = StepLoader(dataset(data=replace(DATA, seed=4)))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="seed=3 in the saved state, 4 here"):
        next(iter(other))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_is_told_where_to_begin_has_no_position(workers: int) -> None:
    """Under Lightning, where the loader's own would be that of the batch read ahead."""
    loader = StepLoader(dataset(), lambda: None, num_workers=workers)
    first = next(iter(loader))
    assert loader.state_dict() == {}
    other = StepLoader(
        dataset(data=replace(DATA, seed=4)), lambda: first.state, num_workers=workers
    )
    batches = iter(other)  # raises nothing: Lightning's teardown would raise an error after it
    with pytest.raises(ValueError, match=r"^The saved data state .*seed=3"):  # no worker's stack
        next(batches)
    loader.load_state_dict({"planner": first.state})
    assert content(next(iter(loader))) == content(first)
