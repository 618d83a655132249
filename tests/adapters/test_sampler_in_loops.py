"""Balanced batches in each framework's loop: every epoch's sequences once, left early, resumed.

torch and torchdata by themselves, Lightning on one process and as DDP on two, Accelerate on one and
on two. transformers' Trainer has its own file.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_wlb.adapters.torch_sampler import BalancedBatchSampler
from tests.ranks import run_ranks

EPOCH, EPOCHS = 6, 3
"""Batches of an epoch on each rank: more than two workers fetch ahead. Epochs of a run."""

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def made(ranks: int = 1, rank: int | None = 0) -> BalancedBatchSampler:
    lengths = np.random.default_rng(0).integers(1, 500, 50 * ranks)
    given = {"sequences": 16 * ranks, "ranks": ranks, "rank": rank, "micro_batches": 2}
    return BalancedBatchSampler(lengths, **given, model="tiny")


def unbroken(ranks: int = 1, rank: int = 0) -> list[list[int]]:
    """All batches of a run, epoch by epoch, as the steps say that they are."""
    sampler = made(ranks, rank)
    found = [each for e in range(EPOCHS) for step in sampler.steps(e) for each in step[rank]]
    assert len(found) == EPOCHS * len(sampler) == EPOCHS * EPOCH
    for start in range(0, len(found), EPOCH):
        names = [name for each in found[start : start + EPOCH] for name in each]
        assert len(set(names)) == len(names)
    return found


def loader_of(kind: Any, workers: int = 0, ranks: int = 1, rank: int | None = 0) -> Any:
    sampler = made(ranks, rank)
    return kind(
        range(len(sampler.lengths)), batch_sampler=sampler, collate_fn=list, num_workers=workers
    )


def loop(loader: Any, first: int = 0, most: int | None = None, sets: bool = True) -> list[Any]:
    """Batches of the epochs from ``first`` on, of each at most ``most``."""
    found = []
    for epoch in range(first, EPOCHS):
        if sets:
            loader.batch_sampler.set_epoch(epoch)
        found += list(islice(loader, most))
    return found


def starts_of_epochs(batches: list[Any], most: int) -> list[Any]:
    return [each for i, each in enumerate(batches) if i % EPOCH < most]


@pytest.mark.parametrize("sets", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_torch_loops_that_are_left_early(kind: Any, workers: int, sets: bool) -> None:
    assert loop(loader_of(kind, workers), sets=sets) == unbroken()
    # Exactly as many batches as the loader has, without asking for the end.
    assert loop(loader_of(kind, workers), most=EPOCH, sets=sets) == unbroken()
    assert loop(loader_of(kind, workers), most=2, sets=sets) == starts_of_epochs(unbroken(), 2)


def test_an_epoch_that_was_set_stays() -> None:
    sampler = made()
    sampler.set_epoch(1)
    assert list(sampler) == list(sampler) == unbroken()[EPOCH : 2 * EPOCH]
    assert sampler.sampler is sampler


@pytest.mark.parametrize("sets", [True, False])
@pytest.mark.parametrize(("workers", "stops"), [(0, range(1, 14)), (2, [2, 6, 7, 12])])
def test_torchdata_resumes_at_every_batch(workers: int, stops: Any, sets: bool) -> None:
    def resumed(state: dict[str, Any], done: int) -> list[Any]:
        loader = loader_of(StatefulDataLoader, workers)
        loader.load_state_dict(state)
        return loop(loader, done // EPOCH, sets=sets)[: EPOCHS * EPOCH - done]

    for stop in stops:
        loader, left = loader_of(StatefulDataLoader, workers), stop
        for epoch in range(EPOCHS):
            if sets:
                loader.batch_sampler.set_epoch(epoch)
            left -= len(list(islice(loader, left)))
            if left == 0:
                break
        assert resumed(loader.state_dict(), stop) == unbroken()[stop:]
    # Saved behind the loop of an epoch, as torchdata's own flag says.
    loader = loader_of(StatefulDataLoader, workers)
    list(loader)
    assert resumed(loader.state_dict(), EPOCH) == unbroken()[EPOCH:]


def test_loops_that_leave_epochs_early_resume_at_the_next() -> None:
    loader, again = loader_of(StatefulDataLoader), loader_of(StatefulDataLoader)
    assert list(islice(loader, 2)) == unbroken()[:2]
    again.load_state_dict(loader.state_dict())
    assert loop(again, 1, most=2) == starts_of_epochs(unbroken()[EPOCH:], 2)


def test_epochs_that_contradict_a_position_or_batches_fetched_ahead() -> None:
    position = {"epoch": 1, "batches": 2}
    sampler = made()
    sampler.load_state_dict(position)
    with pytest.raises(ValueError, match=r"position is in epoch 1, and set_epoch\(0\) asks for"):
        sampler.set_epoch(0)
    sampler = made()
    sampler.set_epoch(0)
    with pytest.raises(ValueError, match=r"call the loader's set_epoch\(1\)"):
        sampler.load_state_dict(position)
    with pytest.warns(UserWarning, match="end of epoch 0, which was set: epoch 1 begins instead"):
        sampler.load_state_dict({"epoch": 0, "batches": EPOCH})
    source = iter(sampler)
    assert next(source) == unbroken()[EPOCH]
    sampler.set_epoch(2)
    with pytest.raises(ValueError, match=r"set_epoch\(2\) came when batches of epoch 1"):
        next(source)
    # A run that goes back loads a position over an epoch that has begun.
    assert next(iter(sampler)) == unbroken()[2 * EPOCH]
    sampler.load_state_dict(position)
    assert [*sampler, *sampler] == unbroken()[EPOCH + 2 :]
    # The first iterator behind an epoch's end may be one that torchdata drops; others count.
    sampler.load_state_dict({"epoch": 0, "batches": EPOCH})
    found = [next(iter(sampler)) for _ in range(3)]
    assert found == [unbroken()[at] for at in (EPOCH, EPOCH, 2 * EPOCH)]


def test_a_first_epoch_that_is_set_too_late() -> None:
    for requested in (1, EPOCH):  # workers may have fetched all of an epoch
        sampler = made()
        source = iter(sampler)
        assert [next(source) for _ in range(requested)] == unbroken()[:requested]
        with pytest.raises(
            ValueError, match=r"set_epoch\(2\) came when batches of epoch 0 had been"
        ):
            sampler.set_epoch(2)
        sampler.set_epoch(2)  # the remedy
        assert list(sampler) == unbroken()[2 * EPOCH :]
    # A loop may look at first batches before it sets epochs.
    sampler = made()
    assert [next(iter(sampler)) for _ in range(2)] == [unbroken()[0], unbroken()[EPOCH]]
    sampler.set_epoch(0)
    assert list(sampler) == unbroken()[:EPOCH]


class Sees(L.LightningModule):
    """Keeps the batches that it is given; one number is its model."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.nn.Parameter(torch.ones(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch: list[int], _: int) -> torch.Tensor:
        self.seen.append([int(each) for each in batch])
        return self.number * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(loader: Any, folder: Path | None = None, ckpt_path: Any = None, **given: Any) -> Any:
    module = Sees()
    steps = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    ends = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=EPOCHS,
        callbacks=[steps, ends] if folder else [],
        enable_checkpointing=folder is not None,
        **{"devices": 1, **given},
    ).fit(module, loader, ckpt_path=ckpt_path)
    return module.seen


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_runs_every_epoch(workers: int) -> None:
    assert fit(loader_of(DataLoader, workers)) == unbroken()
    limited = fit(loader_of(DataLoader, workers), limit_train_batches=2)
    assert limited == starts_of_epochs(unbroken(), 2)


@pytest.mark.parametrize(("workers", "stops"), [(0, range(1, 14)), (2, [2, 6, 7])])
def test_lightning_resumes_at_every_batch(tmp_path: Path, workers: int, stops: Any) -> None:
    assert fit(loader_of(StatefulDataLoader, workers), tmp_path) == unbroken()
    for stop in stops:
        again = loader_of(StatefulDataLoader, workers)
        assert fit(again, ckpt_path=tmp_path / f"step={stop}.ckpt") == unbroken()[stop:]


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("first", ["step=2", "epoch=0"])
def test_lightning_resumes_twice(tmp_path: Path, workers: int, first: str) -> None:
    fit(loader_of(StatefulDataLoader, workers), tmp_path)
    path, again = tmp_path / f"{first}.ckpt", loader_of(StatefulDataLoader, workers)
    if workers and first == "epoch=0":  # three workers have fetched the whole epoch
        with pytest.raises(ValueError, match=r"call the sampler's set_epoch\(1\) before .* fit"):
            fit(again, ckpt_path=path)
        again.batch_sampler.set_epoch(1)
    done = 2 if first == "step=2" else EPOCH
    assert fit(again, tmp_path / "again", ckpt_path=path) == unbroken()[done:]
    for second, done in (("step=8", 8), ("epoch=1", 2 * EPOCH)):
        again = loader_of(StatefulDataLoader, workers)
        again.batch_sampler.set_epoch(done // EPOCH)
        found = fit(again, ckpt_path=tmp_path / "again" / f"{second}.ckpt")
        assert found == unbroken()[done:]


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_resumes_epochs_that_are_limited(tmp_path: Path, workers: int) -> None:
    expected = starts_of_epochs(unbroken(), 2)
    limit = {"limit_train_batches": 2}
    assert fit(loader_of(StatefulDataLoader, workers), tmp_path, **limit) == expected
    for done in (2, 3):
        path, again = tmp_path / f"step={done}.ckpt", loader_of(StatefulDataLoader, workers)
        if workers and done == 2:  # they have fetched the rest of an epoch that was left
            with pytest.raises(ValueError, match=r"call the sampler's set_epoch\(1\) before"):
                fit(again, ckpt_path=path, **limit)
            again.batch_sampler.set_epoch(1)
        assert fit(again, ckpt_path=path, **limit) == expected[done:]


def fit_two(rank: int) -> list[Any]:
    return fit(loader_of(DataLoader, 0, 2, rank), strategy="ddp", devices=2)


@pytest.mark.timeout(120)
def test_lightning_ddp_runs_every_epoch_on_two_ranks() -> None:
    found = run_ranks(fit_two, 2, process_group=False, timeout=100)
    assert found == [unbroken(2, rank) for rank in range(2)]


def accelerated(rank: int, ranks: int, workers: int) -> None:
    """Accelerate's documented loops, each with the one call that they need."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    def prepared(stateful: bool = False) -> tuple[Any, Any]:
        configuration = DataLoaderConfiguration(use_stateful_dataloader=stateful)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        return accelerator, accelerator.prepare(loader_of(DataLoader, workers, ranks, None))

    def epochs(loader: Any, first: int = 0, most: int | None = None) -> Iterator[Any]:
        for epoch in range(first, EPOCHS):
            loader.set_epoch(epoch)
            yield from islice(loader, most)

    whole = unbroken(ranks, rank)
    accelerator, loader = prepared()
    assert accelerator.num_processes == ranks
    assert [each for _ in range(EPOCHS) for each in loader] == whole
    assert list(epochs(prepared()[1])) == whole
    assert list(epochs(prepared()[1], most=2)) == starts_of_epochs(whole, 2)
    for done in range(1, 2 * EPOCH + 1) if workers == 0 else (2, EPOCH):
        epoch, skipped = divmod(done, EPOCH)
        accelerator, loader = prepared()
        loader.set_epoch(epoch)
        found = list(accelerator.skip_first_batches(loader, skipped) if skipped else loader)
        assert found + list(epochs(loader, epoch + 1)) == whole[done:]
        # torchdata's state in place of the skipping.
        _, loader = prepared(stateful=True)
        assert list(islice(epochs(loader), done)) == whole[:done]
        state = loader.state_dict()
        _, loader = prepared(stateful=True)
        loader.load_state_dict(state)
        assert list(epochs(loader, epoch)) == whole[done:]


@pytest.mark.timeout(120)
def test_accelerate_on_two_processes() -> None:
    pytest.importorskip("accelerate")
    run_ranks(accelerated, 2, 2, 0, process_group=False, timeout=100)


@pytest.mark.parametrize("workers", [0, 2])
def test_accelerate_on_one_process(workers: int) -> None:
    state = pytest.importorskip("accelerate.state")
    try:
        accelerated(0, 1, workers)
    finally:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
