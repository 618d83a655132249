"""What the data module takes from the Trainer: the rank's place, the mesh, and the pipeline."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_wlb.cost.attention_tiles import reference_kernel_cost
from lightning_wlb.cost.communication import COMMUNICATOR_BYTES
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.rates import AttentionTable
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.planning_context import PlanningContext
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.plan import Scheme
from lightning_wlb.sharding import choose
from tests.data.test_datamodule import SHAPE, data


class Strategy:
    """A strategy of which only the context of its plans is told."""

    root_device = torch.device("cpu")

    def __init__(self, **context: Any) -> None:
        self.context = context

    def planning_context(self, documents: WLBDataModule) -> PlanningContext:
        alone = PlanningContext.of_one_rank(
            MODULE, self.context.get("shape", SHAPE), documents.profile
        )
        return replace(alone, **self.context)


class AnyTrainer(SimpleNamespace):
    """Stands for a Trainer, by which a data module holds its position."""

    __hash__ = object.__hash__
    state = SimpleNamespace(fn=None)
    _checkpoint_connector = SimpleNamespace()


MODULE = SimpleNamespace(model_shape=SHAPE, planned_checkpointing="auto")


def stand(documents: WLBDataModule, strategy: Any = None, **context: Any) -> None:
    """Give it a Trainer of which only the strategy and a module are told."""
    documents.trainer = AnyTrainer(  # type: ignore[assignment]
        strategy=strategy or Strategy(**context), lightning_module=MODULE, global_step=0
    )


def test_the_strategy_says_where_the_rank_stands() -> None:
    documents = data()
    stand(documents, rank=Rank(Mesh(data=3, context=2, tensor=2), data=1))
    batch = next(iter(documents.train_dataloader()))
    assert batch.replica == 1
    assert len(batch.plan.replicas) == 3


def test_an_adaptive_sharding_goes_by_the_device_profile() -> None:
    """A kernel that is fast on one shape of segments only, another sharding."""
    shape = replace(SHAPE, vocab_size=0)
    lengths = [900, 500, 300, 150, 80, 40, 20, 10]
    h100 = Profile.load("h100")
    # As fast for a segment of one query as for long ones: without tiles or keys to copy.
    tileless = replace(
        h100,
        attention=(AttentionTable(shape.head_dim, 1, (1,), (1.0,), ((1e14,),), ((1e14,),)),),
        element_bytes_per_second=1e30,
    )
    chosen = []
    for profile in (None, tileless):
        documents = data(
            documents=[[1] * length for length in lengths],
            context_window=2000,
            micro_batches=1,
            packing="original",
            profile=profile,
        )
        stand(documents, shape=shape, rank=Rank(Mesh(context=4)))
        (micro_batch,) = next(iter(documents.train_dataloader())).plan.replicas[0].forward
        chosen.append(micro_batch.sharding)
        cost = reference_kernel_cost
        if profile is not None:
            cost = LatencyModel(profile, shape, Mesh(context=4)).segment_cost
        plan = next(iter(documents.train_dataloader())).plan
        tokens = [part.tokens for part in plan.replicas[0].slices_of(micro_batch)]
        assert micro_batch.sharding == choose(tokens, 4, 1, cost)[0]
    assert chosen[0] != chosen[1]
    assert data(profile="h100").profile == h100
    with pytest.raises(ValueError, match="h1000"):
        data(profile="h1000")


def test_process_groups_of_strategies_take_room_of_every_step() -> None:
    """On a GPU that is too small for them; with the mesh's own, and of all strategies."""
    small = replace(Profile.load("h100"), memory_bytes=10**10, device_type="cuda")
    context = PlanningContext.of_one_rank(MODULE, replace(SHAPE, layers=2), small)
    pairs = tuple(Scheme(first, (1, 1)) for first in (0, 2))
    found = []
    for schemes in ((), (pairs,)):
        predictor = replace(context, rank=Rank(Mesh(4)), schemes=schemes).predictor
        found.append(predictor.usable_bytes)
        if schemes:
            (kinds,) = Pool.of(schemes, predictor).kinds.values()
            assert {kind.scorer.limit for kind in kinds.values()} == {found[-1]}
    # Two channels, a pair of pipelines that share a micro-batch, all ranks.
    assert found[0] - found[1] == 4 * COMMUNICATOR_BYTES


def test_ranks_without_the_strategy_are_refused() -> None:
    documents = data()
    stand(documents, SimpleNamespace())
    documents.trainer.world_size = 2  # type: ignore[union-attr]
    with pytest.raises(
        MisconfigurationException, match=r"2 data-parallel ranks.*use strategy='wlb'"
    ):
        documents.train_dataloader()


def test_documents_are_sliced_on_the_strategys_pipeline():
    documents = data(
        documents=[[1] * length for length in (4000, 100, 100)],
        context_window=4000,
        micro_batches=2,
        packing="auto",
    )
    stand(documents, rank=Rank(Mesh(pipeline=4)))
    (replica,) = next(iter(documents.train_dataloader())).plan.replicas
    assert any(part.context > 0 for part in replica.slices)


def test_plans_recompute_what_the_module_asks_for() -> None:
    """By itself as little as fits, or as fits best."""
    shape = replace(SHAPE, vocab_size=0, layers=4)
    found = {}
    for checkpointing, memory in (("auto", 10**9), ("auto", 1), ("full", 10**9), ("none", 1)):
        documents = data(
            documents=[[1] * 100, [1] * 100],
            context_window=100,
            micro_batches=2,
            packing="original",
            shuffle=False,
            profile=replace(Profile.load("h100"), memory_bytes=memory),
        )
        stand(documents, shape=shape, activation_checkpointing=checkpointing)
        batch = next(iter(documents.train_dataloader()))
        forward = batch.plan.replicas[0].forward
        found[checkpointing, memory] = {each.recompute for each in forward}
        assert [each.recompute for each in batch.micro_batches] == [
            each.recompute for each in forward
        ]
    assert found == {
        ("auto", 10**9): {"none"},
        ("auto", 1): {"full"},
        ("full", 10**9): {"full"},
        ("none", 1): {"none"},
    }


def test_a_models_sliding_window_shortens_what_its_batches_read() -> None:
    keys = {}
    for window in (None, 5):
        documents = data(
            documents=[[1] * 64],
            micro_batches=1,
            sharding="per_document",
        )
        shape = replace(SHAPE, sliding_window=window)
        stand(documents, shape=shape, rank=Rank(Mesh(context=2)))
        (micro_batch,) = next(iter(documents.train_dataloader())).micro_batches
        keys[window] = micro_batch.attention.keys
        assert micro_batch.attention.sliding_window == window
    # The first and the last quarter: with all keys before it, or with four.
    assert keys == {None: 16 + 64, 5: 16 + 16 + 4}
