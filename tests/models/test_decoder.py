"""The base class of models: what it gives, and what it refuses.

Which part of a parameter a rank holds, and how it gets its values.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from lightning_wlb.models.decoder import Decoder, check_decoder, initial_value
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.tensor_parallel import assign, held, shard_parameters, share_of
from tests.models.steps import config, documents, step_batch
from tests.ranks import run_ranks


class Bare(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 3, bias=False)
        self.layers = nn.ModuleDict({"0": nn.Linear(3, 3)})
        self.head = nn.Linear(3, 2, bias=False)

    def initial_deviation(self, name: str) -> float:
        return 0.5 if name.startswith("layers.") else 0.25


def test_initial_values_are_a_function_of_seed_and_name():
    model = Bare()
    model.initialise(3)
    for name, parameter in model.named_parameters():
        deviation = 0.5 if name.startswith("layers.") else 0.25
        assert torch.equal(parameter, initial_value(name, parameter.shape, 3, deviation))
    assert not model.layers["0"].bias.any()


def test_without_a_plan_tensor_parallelism_is_refused():
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: Bare has no tensor_parallel_pl"):
        Bare().tensor_parallel_plan(2)


def test_forward_is_the_subclasss():
    assert Bare().tied == {}
    with pytest.raises(NotImplementedError, match=r"Bare\.forward"):
        Bare()(None)


@pytest.mark.parametrize("own", ["none", "selective", "auto"])
@pytest.mark.parametrize("asked", ["auto", "none", "full"])
def test_plans_ask_for_what_the_model_recomputes(own, asked):
    """What the model always does, or else what was asked for; one is not turned into the other."""
    module = LanguageModule(config(), activation_checkpointing=asked)
    assert module.planned_checkpointing == asked  # before there is a model
    module.model = Bare()
    module.model.activation_checkpointing = own
    if own == "auto" or asked in ("auto", own):
        check_decoder(module.model, asked)
        assert module.planned_checkpointing == (asked if own == "auto" else own)
    else:
        with pytest.raises(ValueError, match=f"'{asked}', but the Bare that .* has '{own}'"):
            check_decoder(module.model, asked)


@pytest.mark.parametrize(("asked", "own"), [("auto", "none"), ("none", "auto")])
def test_a_plan_with_another_recomputation_is_refused(asked, own):
    module = LanguageModule(config(), activation_checkpointing=asked)
    module.model = Bare()
    module.model.activation_checkpointing = own
    batch = step_batch(documents(), recompute=("none", "full"))
    with pytest.raises(ValueError, match=r"recomputes 'full', but plans .*checkpointing='none'"):
        module.step(batch)


# Both axes on one dim, on two; fewer rows than ranks, and rows that do not divide.
CASES = (
    ((8, 6), Shard(0)),
    ((2, 4), Shard(0)),
    ((5, 4), Shard(1)),
    ((4, 6, 2), Shard(1)),
    ((3,), Replicate()),
    ((1, 4), Replicate()),
)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def on_mesh(rank: int, data: int, tensor: int) -> list[list[float]]:
    """Parameters that are split without memory, then filled: what the rank holds of each."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    parts = []
    for shape, placement in CASES:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(shape, device="meta"))
        shard_parameters(module, mesh["tensor"], {"weight": placement})
        fully_shard(module, mesh=mesh["data"])
        parameter = nn.Parameter(torch.empty_like(module.weight.detach(), device="cpu"))
        assign(parameter, numbered(shape))
        assert torch.equal(held(parameter), numbered(shape)[share_of(parameter)])
        assert torch.equal(parameter.detach().full_tensor(), numbered(shape))
        parts.append(held(parameter).flatten().tolist())
    return parts


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (4, 1)])
def test_shares_of_both_axes_make_up_the_whole_parameter(data, tensor):
    ranks = run_ranks(on_mesh, data * tensor, data, tensor)
    for number, (shape, placement) in enumerate(CASES):
        copies = tensor if placement == Replicate() else 1
        got = sorted(value for parts in ranks for value in parts[number])
        assert got == sorted(numbered(shape).flatten().tolist() * copies)


def test_a_plain_parameter_is_held_whole():
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert share_of(parameter) == (slice(0, 2), slice(0, 3))
    assign(parameter, numbered((2, 3)))
    assert parameter.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
