"""Parameters and gradients between real shards and unequal pipelines, on four ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from lightning_wlb.distributed.device_mesh import data_context, device_mesh
from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.heterogeneous.running_exchange import ExchangeGroups, exchange_groups
from lightning_wlb.heterogeneous.setup import weights_of
from lightning_wlb.heterogeneous.transfer import Pull, Push
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.tensor_parallel import placement_of
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Scheme, Schemes, schemes_of
from lightning_wlb.training.parallelize import parallelize
from tests.ranks import run_ranks

LAYERS = 3
STAGES = {1: [range(3)], 2: [range(1), range(1, 3)]}
BASES = ((Mesh(4), False), (Mesh(1, 2, 1, 2), True))  # tied: without a layer's and some gradients
FROZEN = ("layers.1.", "layers.2.attention")
STRATEGIES: tuple[tuple[Schemes, int], ...] = (  # and the ranks of a node
    ((Scheme(0, (3,), tensor=2), Scheme(2, (2, 1))), 2),
    ((Scheme(0, (3,), tensor=4),), 4),  # key and value heads are whole on every rank
    ((Scheme(0, (3,), context=2), Scheme(2, (3,)), Scheme(3, (3,))), 2),
)


def config(tied: bool) -> TransformerConfig:
    return TransformerConfig(
        dim=16, layers=LAYERS, heads=4, kv_heads=2, ffn_dim=24, vocab_size=32, tied_embeddings=tied
    )


def part(model: Transformer, name: str, whole: torch.Tensor, tensor: int, place: int):
    """A tensor-parallel rank's part, by torch's own cut."""
    split = placement_of(name, model.tensor_parallel_plan(tensor))
    return whole.chunk(tensor, split.dim)[place] if isinstance(split, Shard) else whole


def expected(model: Transformer, strategy: Schemes, values: dict[str, torch.Tensor], rank: int):
    """What a rank holds in the step."""
    scheme = next(each for each in strategy if rank in each.ranks)
    stage, _, place = scheme.place(rank)
    layers = {f"layers.{number}" for number in scheme.layers[stage]}
    ends = {"embed": stage == 0, "head": stage == len(scheme.stages) - 1}
    users = {"embed.weight": any(ends.values())} if model.tied else {}
    return {
        name: part(model, name, value, scheme.tensor, place)
        for name, value in values.items()
        if users.get(name, ".".join(name.split(".")[:2]) in layers or ends.get(name.split(".")[0]))
    }


def gradient(whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Whole numbers, so that sums do not depend on their order."""
    return torch.arange(whole.numel(), dtype=whole.dtype).reshape(whole.shape) % 97 + 7.0**rank


def travel(rank: int) -> int:
    """Every base mesh and strategy; how many were compared."""
    count = 0
    groups = {each: exchange_groups(rank, 4, each, None) for each in (2, 4)}
    for mesh, tied in BASES:
        torch.manual_seed(0)
        reference = Transformer(config(tied)).double()
        reference.initialise(7)
        values = {name: each.detach() for name, each in reference.named_parameters()}
        with torch.device("meta"):
            model = Transformer(config(tied))
        for name, each in model.named_parameters():
            each.requires_grad_(not (tied and name.startswith(FROZEN)))
        weights = weights_of(model, (1, 2, 4))
        axes = device_mesh(mesh, "cpu")
        stages = STAGES[mesh.pipeline]
        parallelize(
            model, axes, stages, data_context(axes).get_group(),
            initialise=lambda: model.initialise(7), device=torch.device("cpu"),  # noqa: B023
            dtype=torch.float64, compute_dtype=torch.float64, sum_dtype=torch.float64,
        )  # fmt: skip
        at_rest = {reference.tied.get(n, n): each for n, each in model.named_parameters()}
        shards = {name: each.to_local().detach() for name, each in at_rest.items()}
        for strategy, per_node in STRATEGIES:
            link = Redistribution(weights, schemes_of(mesh, stages), strategy, rank, per_node)
            check_pull(reference, link, groups[per_node], shards, values)
            check_push(reference, link, groups[per_node], at_rest, values)
            count += 1
    return count


def check_pull(reference, link, groups, shards, values) -> None:
    want = expected(reference, link.schemes, values, link.rank)
    pull = Pull(link, groups, shards, torch.float64, torch.device("cpu"))
    found: dict[str, torch.Tensor] = {}
    for turn in range(len(link.buckets)):
        found |= pull.arrive(turn)
    pull.finish()
    assert found.keys() == want.keys()
    for name, value in found.items():
        assert torch.equal(value, want[name]), name


def check_push(reference, link, groups, at_rest: dict[str, DTensor], values) -> None:
    sums = {name: torch.zeros_like(value) for name, value in values.items()}
    for other in range(4):
        whole = {name: gradient(value, other) for name, value in values.items()}
        mine = expected(reference, link.schemes, whole, other)
        # Views of where the rank's parts are in the whole.
        for name, view in expected(reference, link.schemes, sums, other).items():
            view += mine[name]
        if other == link.rank:
            own = {name: each for name, each in mine.items() if name not in link.weights.frozen}
    push = Push(link, groups, own, torch.float64, torch.device("cpu"))
    while push.next >= 0:
        push.post()
    totals = push.finish()
    assert not link.weights.frozen & totals.keys()
    for name, rest in at_rest.items():
        if name in link.weights.frozen:
            continue
        local = totals.get(name, torch.zeros_like(rest.to_local()))
        found = DTensor.from_local(
            local, rest.device_mesh, rest.placements, shape=rest.shape, stride=rest.stride()
        )
        assert torch.equal(found.full_tensor(), sums[name]), name


def test_parameters_arrive_and_gradients_add_up_exactly() -> None:
    """All ranks join the same collectives, with other stages and with none of them lacking."""
    assert run_ranks(travel, 4, timeout=100) == [len(BASES) * len(STRATEGIES)] * 4


def test_a_link_for_other_shards_is_refused() -> None:
    with torch.device("meta"):
        model = Transformer(config(False))
    one = (Scheme(0, (3,)),)
    link = Redistribution(weights_of(model, (1,)), one, one, 0, 1)
    rest = {name: each[1:] for name, each in model.named_parameters()}
    with pytest.raises(ValueError, match=r"embed.weight: rank 0 has a tensor of shape \(31, 16\)"):
        Pull(link, ExchangeGroups({}), rest, torch.float32, torch.device("cpu"))
