from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_wlb.distributed import collectives
from lightning_wlb.distributed.collectives import reducing_in
from lightning_wlb.distributed.process_groups import ProcessGroups
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.tensor_parallel import (
    gather_rows,
    local,
    scatter_rows,
    shard_parameters,
)
from lightning_wlb.models.transformer import Transformer
from tests.device import DEVICE
from tests.models.steps import (
    MICRO_BATCHES,
    PIECES,
    config,
    documents,
    loss_masks,
    spread,
    step_batch,
)
from tests.oracle import oracle, relative_error
from tests.ranks import run_ranks


def build(options):
    return spread(Transformer(config(**options)).double())


def _gradients(rank, context_size, tensor_size, options, recompute, masked, meta, chunks=0):
    mesh = init_device_mesh(DEVICE.type, (context_size, tensor_size), mesh_dim_names=("cp", "tp"))
    if meta:
        with torch.device("meta"):
            model = Transformer(config(**options)).double()
    else:
        model = build(options).to(DEVICE)
    behind = (lambda rows, ranks: chunks) if chunks else None
    groups = ProcessGroups(mesh["cp"].get_group(), mesh["tp"].get_group(), chunks=behind)
    shard_parameters(model, mesh["tp"], model.tensor_parallel_plan(tensor_size))
    if meta:
        model.to_empty(device=DEVICE)
        spread(model)
    at = Mesh(context=context_size, tensor=tensor_size).coordinate(rank)
    masks = loss_masks() if masked else None
    batch = step_batch(documents(), MICRO_BATCHES, masks, at, recompute=recompute).to(DEVICE)
    total = sum(model(micro_batch, groups=groups) for micro_batch in batch.micro_batches)
    total.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor()
        dist.all_reduce(gradient, group=mesh["cp"].get_group())
        gradients[name] = gradient.cpu()
    return total.item(), gradients


# Sizes of context and tensor parallelism, options, recomputation, loss masks, memory given later.
CASES = {
    2: [
        (1, 2, {}, ("none",), False, False),
        (1, 2, {"tied_embeddings": True}, ("selective", "none", "full"), True, True),
        (1, 2, {"tied_embeddings": True}, ("selective", "none", "full"), True, True, 1),
        (1, 2, {}, ("none",), False, False, 4),
    ],
    3: [
        (
            1,
            3,
            {"heads": 6, "kv_heads": 3, "head_dim": 4},
            ("none", "full", "selective"),
            True,
            False,
            3,
        )
    ],
    4: [
        (1, 4, {"kv_heads": 4}, ("full",), False, True),
        # Fewer key/value heads than ranks.
        (1, 4, {"kv_heads": 2}, ("none",), True, True),
        (1, 4, {"kv_heads": 1, "tied_embeddings": True}, ("selective",), False, False),
        (2, 2, {"kv_heads": 1}, ("full", "selective", "none"), True, False),
        (1, 4, {"kv_heads": 1, "tied_embeddings": True}, ("selective",), False, False, 2),
        (2, 2, {"kv_heads": 1}, ("full", "selective", "none"), True, False, 3),
    ],
}


def _all_gradients(rank):
    return [_gradients(rank, *case) for case in CASES[dist.get_world_size()]]


@pytest.mark.parametrize("ranks", CASES)
def test_gradients_equal_one_process(ranks):
    found = run_ranks(_all_gradients, ranks)
    for number, case in enumerate(CASES[ranks]):
        _, tensor_size, options, _, masked, *_ = case
        loss, wanted = oracle(build(options), documents(), PIECES, loss_masks() if masked else None)
        results = [each[number] for each in found]
        for start in range(0, len(results), tensor_size):
            assert len({results[start + rank][0] for rank in range(tensor_size)}) == 1
        total = sum(results[start][0] for start in range(0, len(results), tensor_size))
        assert total == pytest.approx(loss, rel=1e-12), case
        for _, gradients in results:
            assert gradients.keys() == wanted.keys()
            for name, gradient in gradients.items():
                assert relative_error(gradient, wanted[name]) <= 1e-10, (case, name)


def _values(rank, tied):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = Transformer(config(kv_heads=1, tied_embeddings=tied))
    shard_parameters(model, mesh, model.tensor_parallel_plan(mesh.size()))
    shared = tied and model.head.weight is model.embed.weight
    model.to_empty(device="cpu")
    model.initialise(5)
    sizes = {name: parameter.to_local().numel() for name, parameter in model.named_parameters()}
    return shared, sizes, {name: p.full_tensor().detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_initial_values_do_not_depend_on_the_mesh(tied):
    model = Transformer(config(kv_heads=1, tied_embeddings=tied))
    model.initialise(5)
    wanted = dict(model.named_parameters())
    for shared, sizes, values in run_ranks(_values, 2, tied):
        assert shared == tied
        assert values.keys() == wanted.keys()
        for name, value in values.items():
            assert torch.equal(value, wanted[name]), name
            whole = name.endswith(("norm.weight", ".wk", ".wv"))
            assert sizes[name] == value.numel() // (1 if whole else 2), name


def _mistakes(rank):
    mesh = init_device_mesh("cpu", (2,))
    messages = []
    for width, plan in ((6, {"0.*": Shard(0)}), (5, {"0.*": Shard(0), "*": Replicate()})):
        model = nn.Sequential(nn.Linear(4, width, bias=False), nn.RMSNorm(width))
        try:
            shard_parameters(model, mesh, plan)
        except ValueError as error:
            messages.append(str(error))
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.RMSNorm(6))
    shard_parameters(model, mesh, {"0.*": Shard(0), "*": Replicate()})
    # Replicated parameters have partial gradients: a sum over ranks still to be made.
    (local(model[1].weight).sum() * (rank + 1)).backward()
    return messages, model[1].weight.grad.full_tensor()


def test_parameters_left_out_or_indivisible_are_refused():
    for messages, gradient in run_ranks(_mistakes, 2):
        assert len(messages) == 2
        assert "names parameter '1.weight'" in messages[0]
        assert (
            "dimension 0 of parameter '0.weight', of shape (5, 4), does not divide" in messages[1]
        )
        assert "tensor_parallel_size=2" in messages[1]
        assert torch.equal(gradient, torch.full((6,), 3.0))


def test_initialise_is_a_function_of_seed_and_name():
    first, second = (Transformer(config()) for _ in range(2))
    first.initialise(5)
    second.initialise(6)
    for name, parameter in first.named_parameters():
        other = second.get_parameter(name)
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        else:
            assert not torch.equal(parameter, other), name
    assert not torch.equal(first.layers["0"].attention.wq, first.layers["1"].attention.wq)
    large = Transformer(config(dim=128, ffn_dim=256))
    large.initialise(5)
    assert large.layers["0"].feed_forward.w1.std().item() == pytest.approx(0.02, rel=0.02)
    assert large.layers["0"].feed_forward.w2.std().item() == pytest.approx(0.01, rel=0.02)
    with torch.device("meta"):
        without_memory = Transformer(config())
    with pytest.raises(ValueError, match="on the meta device"):
        without_memory.initialise(5)


def exchange(rank: int) -> dict[str, list[float]]:
    """gather_rows and scatter_rows forward and backward, on values that tell ranks apart."""
    group = dist.group.WORLD
    x = torch.tensor([10.0 * rank, 10.0 * rank + 1], dtype=torch.float64, requires_grad=True)
    gathered = gather_rows(x, group)
    # Rank r weighs gathered row i by (r + 1) · (i + 1), so the gradient of row i is 6 · (i + 1).
    weights = (rank + 1) * torch.arange(1.0, 7.0, dtype=torch.float64)
    (gather_gradient,) = torch.autograd.grad(gathered, x, weights)

    y = ((rank + 1) * torch.arange(6.0, dtype=torch.float64)).requires_grad_()
    scattered = scatter_rows(y, group)
    (scatter_gradient,) = torch.autograd.grad(
        scattered, y, torch.tensor([rank, rank + 0.5], dtype=torch.float64)
    )

    # In bfloat16 256 + 1 is 256; summed in float32 it is 258, which bfloat16 can hold.
    half = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    share = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)[rank]
    (half_gradient,) = torch.autograd.grad(gather_rows(half, group), half, share.repeat(3))
    half_sum = scatter_rows(share.repeat(3), group)
    assert half_gradient.dtype == half_sum.dtype == torch.bfloat16
    sent, reduce_scatter = [], collectives.reduce_scatter_into
    with mock.patch.object(
        collectives,
        "reduce_scatter_into",
        lambda out, x, **options: (sent.append(x.dtype), reduce_scatter(out, x, **options)),
    ):
        for least in (torch.float32, torch.bfloat16):
            with reducing_in(least):
                scatter_rows(share.repeat(3), group)
                scatter_rows(share.float().repeat(3), group)
    # Never narrower than the values.
    assert sent == [torch.float32, torch.float32, torch.bfloat16, torch.float32]

    empty = torch.empty(0, 3, requires_grad=True)
    assert gather_rows(empty, group).shape == scatter_rows(empty, group).shape == (0, 3)
    with pytest.raises(ValueError, match="4 rows cannot be scattered over 3 ranks"):
        scatter_rows(torch.zeros(4), group)
    return {
        "gathered": gathered.tolist(),
        "gather_gradient": gather_gradient.tolist(),
        "scattered": scattered.tolist(),
        "scatter_gradient": scatter_gradient.tolist(),
        "half": [*half_gradient.tolist(), *half_sum.tolist()],
    }


def test_gather_and_scatter_rows() -> None:
    ranks = run_ranks(exchange, 3)
    for rank, got in enumerate(ranks):
        assert got["gathered"] == [0, 1, 10, 11, 20, 21]
        assert got["gather_gradient"] == [6 * (2 * rank + 1), 6 * (2 * rank + 2)]
        assert got["scattered"] == [6 * 2 * rank, 6 * (2 * rank + 1)]
        assert got["scatter_gradient"] == [0, 0.5, 1, 1.5, 2, 2.5]
        assert got["half"] == [258, 258]


def test_without_a_group_gather_and_scatter_are_the_identity() -> None:
    x = torch.zeros(3, 2)
    assert gather_rows(x, None) is x
    assert scatter_rows(x, None) is x
