import pickle
import random
from dataclasses import replace
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.data import loader as loading
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.data.datamodule import ConsumedState
from lightning_wlb.data.loader import StepDataset, StepLoader
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.planning.planner import DataSettings, Planner, Release
from tests import ranks  # noqa: F401  (what a new process has imported already)

# Documents wait in queues and are drained at the end of an epoch.
DATA = DataSettings(context_window=64, micro_batches=2, packing="wlb", seed=3)

SHAPE = ModelShape(dim=64, layers=1, heads=1, kv_heads=1, head_dim=64, ffn_dim=64, vocab_size=99)


WORK = Work(PassWork(16, 1), PassWork(33, 1))


def store() -> InMemoryDocuments:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3, 1, 60), 1, 300).astype(int)
    return InMemoryDocuments([rng.integers(0, 99, length) for length in lengths], vocab_size=99)


def dataset(**changes: Any) -> StepDataset:
    arguments: dict[str, Any] = {"store": store(), "data": DATA, "work": WORK, **changes}
    return StepDataset(**arguments)


def epochs(steps: StepDataset | StepLoader, count: int) -> list[StepBatch]:
    """The batches of the next epochs."""
    return [batch for _ in range(count) for batch in steps]


def content(batch: StepBatch) -> tuple[Any, ...]:
    tensors = [
        (each.tokens.tolist(), each.labels.tolist(), each.positions.tolist())
        for each in batch.micro_batches
        if each.tokens is not None and each.labels is not None
    ]
    return batch.plan, batch.state, batch.next_digest, batch.last, tensors


def test_one_iteration_is_one_epoch_and_announces_the_next_plan() -> None:
    batches = epochs(dataset(), 2)
    assert [batch.plan.step for batch in batches] == list(range(len(batches)))
    ends = [batch.plan.epoch for batch in batches].index(1)
    assert batches[ends - 1].plan.drain
    assert 3 < ends < len(batches) - 3
    for batch, following in pairwise(batches):
        same_epoch = batch.plan.epoch == following.plan.epoch
        assert batch.next_digest == (following.plan.digest if same_epoch else 0)
    assert not any(batch.last for batch in batches)
    total = int(store().lengths.sum())
    assert sum(batch.tokens for batch in batches[:ends]) == total
    assert sum(batch.tokens for batch in batches[ends:]) == total
    assert batches[0].plan.pieces != batches[ends].plan.pieces, "a new order in each epoch"


def test_resume_from_any_batch_continues_with_the_next() -> None:
    unbroken = epochs(dataset(), 2)
    for number, batch in enumerate(unbroken[:-1]):
        resumed = next(iter(dataset(state=batch.state)))
        assert content(resumed) == content(unbroken[number + 1])
    # Not only the next one: queues and carried documents too.
    middle = len(unbroken) // 4
    rest = epochs(dataset(state=unbroken[middle].state), 2)
    assert [content(each) for each in rest] == [content(each) for each in unbroken[middle + 1 :]]


@pytest.mark.parametrize("workers", [0, 2])
def test_other_documents_of_the_same_lengths_are_not_resumed_on(workers: int) -> None:
    """A state from before digests were saved goes on, and so does the same store."""
    state, other = next(iter(dataset())).state, store()
    other.read(0, 0, 1)[0] += 1
    with pytest.raises(ValueError, match="not what the saved run read"):
        next(iter(StepLoader(dataset(store=other, state=state), num_workers=workers)))
    old = {name: each for name, each in state.items() if name != "corpora"}
    for resumed in (dataset(state=state), dataset(store=other, state=old)):
        assert next(iter(StepLoader(resumed, num_workers=workers))).plan.step == 1


def test_resume_on_another_mesh_has_the_same_pieces() -> None:
    unbroken = list(dataset())
    rank = Rank(Mesh(data=3, context=2, tensor=2), data=1, context=1)
    resumed = list(dataset(state=unbroken[2].state, rank=rank))
    assert [batch.plan.pieces for batch in resumed] == [batch.plan.pieces for batch in unbroken[3:]]
    assert [batch.state for batch in resumed] == [batch.state for batch in unbroken[3:]]
    assert {len(batch.plan.replicas) for batch in resumed} == {3}


def test_max_tokens_marks_the_last_batch_and_a_longer_run_continues_from_it() -> None:
    unbroken = epochs(dataset(), 2)
    bounds = np.cumsum([batch.tokens for batch in unbroken]).tolist()
    epoch_end = [batch.plan.epoch for batch in unbroken].index(1)
    for steps in (3, epoch_end):
        bounded = dataset(data=replace(DATA, max_tokens=bounds[steps - 1]))
        batches = list(bounded)
        assert [batch.last for batch in batches] == [False] * (steps - 1) + [True]
        assert batches[-1].next_digest == 0
        assert list(bounded) == []
        longer = dataset(data=replace(DATA, max_tokens=10**9), state=batches[-1].state)
        assert next(iter(longer)).plan == unbroken[steps].plan


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_nothing(workers: int) -> None:
    whole = list(dataset())
    # Seven steps: a multiple of neither 2 nor 3, so that some workers finish before others.
    begin = whole[-8].state
    loader = StepLoader(dataset(), lambda: begin, num_workers=workers)
    assert [content(batch) for batch in loader] == [content(batch) for batch in whole[-7:]]


@pytest.mark.parametrize("seed", range(2))
def test_a_run_broken_anywhere_goes_on_with_the_first_step_not_taken(seed: int) -> None:
    """The worker has planned ahead of the break; steps that fail are taken again."""
    unbroken = epochs(dataset(), 2)
    rng = random.Random(seed)
    consumed, taken = ConsumedState(), []
    loader = StepLoader(dataset(), lambda: consumed.current(len(taken)), num_workers=1)
    while len(taken) < len(unbroken):
        until = rng.randint(1, len(unbroken) // 2)
        for batch in loader:
            consumed.begin(batch, len(taken))
            if until == 0:
                break  # this step was begun and not taken
            taken.append(batch)
            until -= 1
    want = [content(batch) for batch in unbroken]
    assert [content(batch) for batch in taken[: len(want)]] == want


def test_a_step_that_is_not_due_is_not_trained_on() -> None:
    """As from a loader that has begun to read before the position was restored."""
    first, second, third = list(dataset())[:3]
    consumed = ConsumedState()
    consumed.begin(first, 0)
    assert consumed.begun
    consumed.restore(second.state)
    assert not consumed.begun, "it was a search's"
    for wrong in (first, second):
        with pytest.raises(MisconfigurationException, match="Step 2 of the documents is due"):
            consumed.begin(wrong, 2)
    consumed.begin(third, 2)


def test_a_worker_places_its_own_steps_and_those_whose_digest_they_carry(monkeypatch):
    placed: list[int] = []
    place = Planner.place

    def noting(planner: Planner, release: Release) -> Any:
        placed.append(release.step)
        return place(planner, release)

    monkeypatch.setattr(Planner, "place", noting)
    whole = list(dataset())
    assert placed == list(range(len(whole))), "one worker places each step once"
    placed.clear()
    second_of_four = SimpleNamespace(id=1, num_workers=4)
    monkeypatch.setattr(loading, "get_worker_info", lambda: second_of_four)
    shared = dataset()
    shared.has_loader = True
    assert [content(batch) for batch in shared] == [content(batch) for batch in whole[1::4]]
    assert placed == [step for step in range(len(whole)) if step % 4 in (1, 2)]


def test_a_worker_that_is_not_forked_gets_the_same() -> None:
    steps = StepDataset(store(), DATA, Work.of(SHAPE))
    copy = pickle.loads(pickle.dumps(steps))
    assert [content(batch) for batch in copy] == [content(batch) for batch in steps]


def test_a_dataset_for_a_model() -> None:
    """It weighs documents by the model, and knows them by their tokens."""
    sequences = [store().read(n, 0, length).tolist() for n, length in enumerate(store().lengths)]
    steps = StepDataset.for_model(sequences, DATA, SHAPE)
    weighed = dataset(work=Work.of(SHAPE))
    assert [content(batch) for batch in steps] == [content(batch) for batch in weighed]
    with pytest.raises(MisconfigurationException, match=r"101 different tokens.* of 99"):
        StepDataset.for_model([[1, 100]], DATA, SHAPE)
    with pytest.raises(ValueError, match="documents='books'"):
        StepDataset.for_model("books", DATA, SHAPE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_pins(workers: int) -> None:
    batches = list(StepLoader(dataset(), num_workers=workers, pin_memory=True))
    assert [content(batch) for batch in batches] == [content(batch) for batch in dataset()]
    assert all(each.positions.is_pinned() for batch in batches for each in batch.micro_batches)


def test_a_loader_with_a_beginning_of_its_own_leaves_the_position_alone() -> None:
    """An evaluation of the data set that is trained on, between its steps."""
    for workers in (0, 1):
        shared = dataset()
        training = StepLoader(shared, num_workers=workers)
        assert [batch.plan.step for batch in islice(training, 2)] == [0, 1]
        evaluating = StepLoader(shared, begin_at=lambda: None, num_workers=workers)
        assert [batch.plan.step for batch in islice(evaluating, 4)] == [0, 1, 2, 3]
        assert next(iter(training)).plan.step == 2
