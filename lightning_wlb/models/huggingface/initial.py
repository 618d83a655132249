"""Building a Hugging Face model without memory, and its initial values as a function of names.

transformers fills a whole model from one stream of random numbers. Here each module is filled by
transformers' own rule for it, whole, on the CPU, by a generator seeded with a hash of the seed and
the module's name; a rank keeps its shard. So every mesh begins with the same values.

Cost: every rank draws the whole of each module of which it holds a shard, and needs memory for the
largest in float32 (in a mixture of experts, all experts of a layer).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_wlb.models.initialise import seed_of

_FEW = 64
"""Values of a parameter that is kept while a model is built: an activation's learned constants."""


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules made inside have parameters on the meta device, and buffers with their values.

    Parameters of a few values keep those of their constructor: transformers' rules for initial
    values leave some of them out.
    """
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.numel() > _FEW:
            marks = vars(parameter)
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            vars(parameter).update(marks)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[assignment,method-assign]
    try:
        # Lightning builds under the meta device, where buffers would have no values.
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def initial_values(
    module: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    rule: Callable[[nn.Module], None],
    seed: int,
    name: str,
) -> dict[str, Tensor]:
    """Initial values of a module's own parameters, whole, float32 on the CPU, by name.

    Args:
        module: looked at, not changed; its parameters may be split or without memory.
        shapes: the family's shape of each parameter.
        rule: fills the parameters of one module; transformers' ``_init_weights``.
        seed: of the run, the same on every rank.
        name: the module's name, on any mesh the same.

    Returns:
        The parameters that the rule fills.
    """
    twin = _twin(module, shapes)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.manual_seed(seed_of(seed, name))
        rule(twin)
    values = {own: each.detach() for own, each in twin._parameters.items() if each is not None}
    return {own: each for own, each in values.items() if not each.isnan().any()}


def _twin(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """A copy of a module alone, its parameters whole and not a number, in float32 on the CPU."""
    twin = copy.copy(module)
    twin._parameters = {
        name: None
        if own is None
        else nn.Parameter(torch.full(shapes[name], torch.nan, dtype=torch.float32, device="cpu"))
        for name, own in module._parameters.items()
    }
    twin._buffers = {
        name: None if own is None else own.detach().to("cpu", copy=True)
        for name, own in module._buffers.items()
    }
    twin._modules = {}
    return twin
