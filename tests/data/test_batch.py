import os
import pickle
import sys
from functools import partial
from multiprocessing.reduction import ForkingPickler

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities import move_data_to_device
from torch.overrides import TorchFunctionMode

from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.data.batch import IGNORE, StepBatch, make_step_batch
from lightning_wlb.data.store_checks import count_targets
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice, StepPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.sharding import SHARDINGS, layout
from lightning_wlb.sharding.sliced_indices import OWN


@pytest.fixture
def batch() -> StepBatch:
    """The second of two ranks that share documents of 8 and 3 tokens; the run's last step."""
    store = InMemoryDocuments([range(8), range(3)])
    mesh = Mesh(context=2)
    work = Work(PassWork(1, 0), PassWork(2, 0))
    plan = Planner(store.lengths, DataSettings(16, 1), work, mesh).next_step()
    return make_step_batch(plan, store, Rank(mesh, context=1), {"a": 1}, 7, True)


def test_moving_a_batch_keeps_the_plan_and_moves_every_tensor(batch: StepBatch) -> None:
    moved = batch.to("meta")
    assert moved.plan is batch.plan
    assert (moved.state, moved.next_digest, moved.last) == ({"a": 1}, 7, True)
    micro_batch = moved.micro_batches[0]
    devices = {
        micro_batch.tokens.device.type,
        micro_batch.labels.device.type,
        micro_batch.positions.device.type,
        micro_batch.attention.cu_seqlens_q.device.type,
    }
    assert devices == {"meta"}
    assert batch.micro_batches[0].positions.device.type == "cpu"
    assert batch.tokens == 11
    assert batch.target_tokens == 9
    assert repr(batch) == (
        "StepBatch(step 0, epoch 0, replica 0 of 1: micro-batches of [6] rows; the step has 11"
        " tokens, 9 targets, 2 pieces, last)"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts open files in /proc")
def test_a_batch_from_a_loader_worker_opens_no_files(batch: StepBatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sent = bytes(ForkingPickler.dumps(batch))
    assert len(os.listdir("/proc/self/fd")) == before
    arrived = pickle.loads(sent)
    assert repr(arrived) == repr(batch)
    assert (arrived.plan, arrived.state) == (batch.plan, batch.state)
    ours, theirs = batch.micro_batches[0], arrived.micro_batches[0]
    for name in ("tokens", "labels", "positions"):
        assert torch.equal(getattr(theirs, name), getattr(ours, name))
    for name in ("cu_seqlens_q", "cu_seqlens_k", "key_index"):
        assert torch.equal(getattr(theirs.attention, name), getattr(ours.attention, name))


class Copies(TorchFunctionMode):
    """Answers every ``Tensor.to`` by the tensor itself, and keeps what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.to:
            self.asked.append((str(args[1]), bool((kwargs or {}).get("non_blocking"))))
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "queued"), [("cuda", True), ("cuda:1", True), ("cpu", False)])
def test_lightning_moves_a_batch_without_waiting_for_each_tensor(batch, device, queued):
    with Copies() as copies:
        move_data_to_device(batch, torch.device(device))
    assert len(copies.asked) >= 5 * len(batch.micro_batches)
    assert set(copies.asked) == {(device, queued)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_page_locked_it_arrives_on_a_gpu_as_it_was(batch: StepBatch) -> None:
    """Moved as Lightning moves it, which does not wait for the copies."""
    pinned = batch.pin_memory()
    assert pinned.micro_batches[0].tokens.is_pinned()
    assert pinned.micro_batches[0].attention.cu_seqlens_q.is_pinned()
    arrived = move_data_to_device(pinned, torch.device("cuda", 0))
    torch.cuda.synchronize()
    for ours, theirs in zip(batch.micro_batches, arrived.micro_batches, strict=True):
        for name in ("tokens", "labels", "positions"):
            assert getattr(theirs, name).device.type == "cuda"
            assert torch.equal(getattr(theirs, name).cpu(), getattr(ours, name))
        for name in ("cu_seqlens_q", "cu_seqlens_k", "key_index"):
            assert torch.equal(getattr(theirs.attention, name).cpu(), getattr(ours.attention, name))


DOCUMENT = 1000  # token t of document d is d·DOCUMENT + t


class Recorder(InMemoryDocuments):
    """Remembers which tokens were read."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.was_read: list[int] = []

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        tokens = super().read(document, start, stop)
        assert len(tokens) == stop - start, "read beyond the document"
        self.was_read += tokens.tolist()
        return tokens


def store_of(lengths: list[int], masks: list | None = None) -> Recorder:
    documents = [
        list(range(number * DOCUMENT, number * DOCUMENT + length))
        for number, length in enumerate(lengths)
    ]
    return Recorder(documents, masks)


WORK = Work(PassWork(16, 1), PassWork(33, 1))


def plans_of(
    store: InMemoryDocuments, data: DataSettings, mesh: Mesh, sharding: str = "adaptive"
) -> list[StepPlan]:
    targets = partial(count_targets, store)
    planner = Planner(store.lengths, data, WORK, mesh, sharding=sharding, targets=targets)
    return list(iter(planner.next_step, None))


def everyone(mesh: Mesh) -> list[Rank]:
    """One rank of each tensor-parallel group."""
    return [mesh.coordinate(rank) for rank in range(0, mesh.devices, mesh.tensor)]


def batch_of(plan: StepPlan, store: InMemoryDocuments, rank: Rank) -> StepBatch:
    return make_step_batch(plan, store, rank, {"step": plan.step}, 0, False)


def one_micro_batch(slices: list[Slice], rank: Rank, sharding: str) -> StepPlan:
    rows = layout(
        sharding,
        [part.tokens for part in slices],
        rank.mesh.context,
        rank.mesh.tensor,
    ).rows
    micro_batch = MicroBatch(tuple(range(len(slices))), sharding, rows, (0,))
    replica = ReplicaPlan(tuple(slices), (micro_batch,))
    return StepPlan(0, 0, (replica,), (), 0, 1 << 20, 1, 1 << 20)


def test_tokens_labels_and_positions_of_one_rank() -> None:
    store = store_of([3, 9], [[True, True, False], None])
    rank = Rank(Mesh(tensor=4))
    # The whole of document 0; the middle of document 1, a piece of its own from token 2 on.
    plan = one_micro_batch([Slice(0, 0, 0, 3), Slice(1, 2, 2, 6)], rank, "per_document")
    (micro_batch,) = batch_of(plan, store, rank).micro_batches
    assert micro_batch.rows == 8
    assert micro_batch.tokens.tolist() == [0, 1, 2, 1002, 1003, 1004, 1005, 0]
    # Token 2 is masked as a target, the label of 1005 comes from beyond the piece.
    assert micro_batch.labels.tolist() == [1, -100, -100, 1003, 1004, 1005, 1006, -100]
    assert micro_batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert micro_batch.tokens.dtype == micro_batch.labels.dtype == torch.int64
    assert micro_batch.attention.rows == 8
    assert micro_batch.attention.queries == 7
    assert micro_batch.attention.cu_seqlens_q.tolist() == [0, 3, 7]


@pytest.mark.parametrize(
    ("stages", "stage", "read"),
    [
        (1, 0, [2, 3, 4, 5, 6]),
        (3, 0, [2, 3, 4, 5]),
        (3, 2, [3, 4, 5, 6]),
        (3, 1, []),
    ],
)
def test_a_stage_reads_only_what_it_needs(stages: int, stage: int, read: list[int]) -> None:
    store = store_of([8])
    rank = Rank(Mesh(pipeline=stages, context=2), pipeline=stage, context=1)
    plan = one_micro_batch([Slice(0, 0, 0, 8)], rank, "per_document")
    (micro_batch,) = batch_of(plan, store, rank).micro_batches
    assert store.was_read == read
    assert (micro_batch.tokens is not None) == (stage == 0)
    assert (micro_batch.labels is not None) == (stage == stages - 1)
    assert micro_batch.positions.tolist() == [2, 3, 4, 5]


def test_a_rank_without_rows_and_a_micro_batch_without_tokens() -> None:
    store = store_of([1])
    rank = Rank(Mesh(context=2), context=1)
    plan = one_micro_batch([Slice(0, 0, 0, 1)], rank, "per_document")
    (micro_batch,) = batch_of(plan, store, rank).micro_batches
    assert (micro_batch.rows, micro_batch.attention.queries) == (1, 0)
    assert micro_batch.tokens.tolist() == [0]
    assert micro_batch.labels.tolist() == [IGNORE]
    assert store.was_read == []
    (empty,) = batch_of(one_micro_batch([], rank, "per_document"), store, rank).micro_batches
    assert empty.rows == 0
    assert empty.positions.tolist() == []


meshes = st.builds(
    Mesh,
    data=st.integers(1, 3),
    context=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2]),
)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=25),
    st.integers(0, 1 << 30),
    meshes,
    st.sampled_from(sorted(SHARDINGS)),
    st.sampled_from(["original", "wlb"]),
    st.sampled_from(["split", "truncate"]),
)
def test_the_mesh_together_gets_every_token_its_target_and_its_position(
    lengths: list[int], seed: int, mesh: Mesh, sharding: str, packing: str, long_documents: str
) -> None:
    rng = np.random.default_rng(seed)
    masks = [rng.random(length) < 0.7 if rng.random() < 0.5 else None for length in lengths]
    store = store_of(lengths, masks)
    data = DataSettings(32, 2, packing, seed=seed, long_documents=long_documents)  # type: ignore[arg-type]
    seen: list[int] = []
    for plan in plans_of(store, data, mesh, sharding):
        origins = {piece: piece.origin for piece in plan.pieces}
        targets = 0
        for rank in everyone(mesh):
            store.was_read = []
            own: list[int] = []
            for micro_batch in batch_of(plan, store, rank).micro_batches:
                assert micro_batch.rows % mesh.tensor == 0
                real = micro_batch.attention.queries
                assert (micro_batch.labels[real:] == IGNORE).all()
                assert (micro_batch.positions[real:] == 0).all()
                targets += int((micro_batch.labels != IGNORE).sum())
                rows = zip(
                    micro_batch.tokens[:real].tolist(),
                    micro_batch.labels[:real].tolist(),
                    micro_batch.positions[:real].tolist(),
                    strict=True,
                )
                for token, label, position in rows:
                    document, offset = divmod(token, DOCUMENT)
                    mask = masks[document]
                    has_target = offset + 1 < lengths[document] and (
                        mask is None or bool(mask[offset + 1])
                    )
                    assert label == (token + 1 if has_target else IGNORE)
                    (origin,) = (
                        origin
                        for piece, origin in origins.items()
                        if piece.document == document and origin <= offset < piece.stop
                    )
                    assert position == offset - origin
                    own.append(token)
            extra = set(store.was_read) - set(own)
            assert extra <= {token + 1 for token in own}, "reads beyond its own labels"
            seen += own
        assert targets == plan.target_tokens
    window = 32 if long_documents == "truncate" else 1 << 30
    expected = [
        number * DOCUMENT + token
        for number, length in enumerate(lengths)
        for token in range(min(length, window))
    ]
    assert sorted(seen) == expected


def test_slices_go_on_where_the_one_before_stopped() -> None:
    store = store_of([8])
    parts = (Slice(0, 0, 0, 5), Slice(0, 0, 5, 8))
    groups = (MicroBatch((0,), "per_document", 5, (0,)), MicroBatch((1,), "per_document", 3, (0,)))
    plan = StepPlan(3, 0, (ReplicaPlan(parts, groups),), (), 0, 8, 1, 8)
    first, second = batch_of(plan, store, Rank()).micro_batches
    assert first.tokens.tolist() == [0, 1, 2, 3, 4]
    assert first.labels.tolist() == [1, 2, 3, 4, 5]
    assert first.attention.slices.keeps
    assert first.attention.slices.runs == ((OWN, 0, 5),)
    assert second.tokens.tolist() == [5, 6, 7]
    assert second.labels.tolist() == [6, 7, IGNORE]
    assert second.positions.tolist() == [5, 6, 7]
    assert not second.attention.slices.keeps
    assert second.attention.slices.runs == ((0, 0, 5), (OWN, 0, 3))
    # Three queries see all five earlier keys and themselves.
    assert second.attention.cu_seqlens_q.tolist() == [0, 3]
    assert second.attention.cu_seqlens_k.tolist() == [0, 8]
    assert second.attention.key_index is None
    assert second.attention.keys == 8


def test_replicas_that_share_a_micro_batch_split_its_tokens() -> None:
    store = store_of([8])
    micro_batch = MicroBatch((0,), "per_document", 4, (0, 1))
    replica = ReplicaPlan((Slice(0, 0, 0, 8),), (micro_batch,))
    plan = StepPlan(4, 0, (replica, replica), (), 0, 8, 1, 8)
    tokens = []
    for number in range(2):
        (micro_batch,) = batch_of(plan, store, Rank(Mesh(data=2), number)).micro_batches
        assert micro_batch.attention.replicas == 2
        tokens.append(micro_batch.tokens.tolist())
    # As one context-parallel group of two: chunks 0 and 3, chunks 1 and 2.
    assert tokens == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_a_batch_says_which_window_it_was_made_for_where_keys_are_missing() -> None:
    store = store_of([40])
    rank = Rank(Mesh(context=2))
    plan = one_micro_batch([Slice(0, 0, 0, 40)], rank, "per_document")
    (micro_batch,) = make_step_batch(plan, store, rank, {}, 0, False, 9).micro_batches
    assert micro_batch.attention.sliding_window == 9


def test_a_plan_for_another_mesh_is_answered() -> None:
    store = store_of([8])
    plan = one_micro_batch([Slice(0, 0, 0, 8)], Rank(), "per_document")
    with pytest.raises(ValueError, match="planned for 1 replicas, but the mesh has 2"):
        batch_of(plan, store, Rank(Mesh(data=2)))
