"""Initial values as a function of a seed and a parameter's name, and of nothing else.

Each parameter is drawn whole, in float32 on the CPU, by a generator of its own that is seeded with
a hash of the seed and the parameter's global name; a rank then keeps its shard. So the same model
comes out on one process, under any tensor-parallel size and on any pipeline stage.

Cost: every rank draws the whole of every parameter of which it holds a shard, and needs memory for
the largest in float32. Not for models that start from a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def initialise(
    model: nn.Module,
    seed: int,
    standard_deviation: Callable[[str], float] = lambda name: 0.02,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Fill the parameters of ``model`` in place.

    Vectors are zeros where their name ends in ``bias``, else ones (they are norm weights);
    everything else is normal with mean 0.

    Args:
        model: its parameters are plain tensors or DTensors, on any device but meta.
        seed: of the run, the same on every rank.
        standard_deviation: by parameter name.
        tied: parameter name -> the name under which its values are drawn, for a parameter that
            equals one of another rank.

    Raises:
        ValueError: a parameter on the meta device, which has no memory to fill.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"initialise: parameter {name} is on the meta device. Give the model memory first,"
                " by model.to_empty(device=...)."
            )
        source = (tied or {}).get(name, name)
        assign(parameter, initial_values(source, parameter.shape, seed, standard_deviation(source)))


def assign(parameter: Tensor, full: Tensor) -> None:
    """Give a parameter its values; of a DTensor each rank keeps its shard, and nothing is sent.

    Args:
        parameter: plain or a DTensor, of any dtype, on any device.
        full: the whole values, in the same shape, the same on every rank.
    """
    with torch.no_grad():
        held(parameter).copy_(full[share_of(parameter)])


def share_of(parameter: Tensor) -> tuple[slice, ...]:
    """Which rectangle of the whole parameter this rank holds, its :func:`held` tensor.

    Under FSDP over tensor parallelism, which both may split the same dim, it is one rectangle too:
    FSDP cuts what tensor parallelism has left.
    """
    sizes, first = tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        sizes, first = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    return tuple(slice(start, start + size) for start, size in zip(first, sizes, strict=True))


def held(parameter: Tensor) -> Tensor:
    """The tensor that this rank holds of a parameter, sharing its memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def seed_of(seed: int, name: str) -> int:
    """A seed for what goes by this name in a run with that seed."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def initial_values(
    name: str, shape: torch.Size, seed: int, standard_deviation: float = 0.02
) -> Tensor:
    """The whole initial value of one parameter, float32 on the CPU."""
    if len(shape) <= 1:
        return (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    return values.normal_(0.0, standard_deviation, generator=generator)
