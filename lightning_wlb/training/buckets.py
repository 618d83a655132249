"""Units: the parameters of a layer, or of an end, that travel as a whole, and how ranks share them.

The *flat* form of a unit, in which it travels, is [ranks, elements]: of each parameter in turn one
chunk per rank, padded to equal size where the shared dim does not divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Share:
    """How the ranks share one parameter.

    Attributes:
        places: the modules that have it, and its name there.
        shape: of the whole parameter, or of this rank's tensor-parallel part of it.
        dim: which the ranks share.
        rows: of that dim, on each rank but the last ones, which may have fewer.
        is_part: whether the gradient is a part of a sum over the tensor-parallel ranks.
    """

    places: tuple[tuple[nn.Module, str], ...]
    shape: tuple[int, ...]
    dim: int
    rows: int
    is_part: bool

    @property
    def at_rest(self) -> DTensor:
        """The parameter, outside of a step."""
        module, name = self.places[0]
        return cast(DTensor, module._parameters[name])

    @property
    def chunk(self) -> tuple[int, ...]:
        """The shape of a rank's part, padded to as many rows as that of others."""
        return (*self.shape[: self.dim], self.rows, *self.shape[self.dim + 1 :])

    def put(self, parameter: nn.Parameter) -> None:
        """Let the modules read ``parameter``."""
        for module, name in self.places:
            module._parameters[name] = parameter


@dataclass(frozen=True)
class Unit:
    """Parameters that travel together.

    Args:
        modules: whose forwards wait for them.
        stages: whose actions use them.
        shares: the parameters.
    """

    modules: tuple[nn.Module, ...]
    stages: frozenset[int]
    shares: tuple[Share, ...]


def unit(modules: Sequence[nn.Module], stages: Sequence[int], inside: Sequence[nn.Module]) -> Unit:
    """A unit of parameters at rest.

    Args:
        modules: whose forwards wait for the unit.
        stages: whose actions use it.
        inside: modules whose own parameters, not those of their children, are in it.
    """
    places: dict[DTensor, list[tuple[nn.Module, str]]] = {}
    for module in inside:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(cast(DTensor, parameter), []).append((module, name))
    shares = tuple(_share(parameter, tuple(at)) for parameter, at in places.items())
    return Unit(tuple(modules), frozenset(stages), shares)


def refuse_hooks(name: str, parameter: Tensor) -> None:
    """Refuse hooks on a parameter at rest, which no backward passes through.

    Raises:
        ValueError: naming it, with the remedy.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"{name} has a hook (register_hook or register_post_accumulate_grad_hook) that would"
            " never run: a step sums gradients over micro-batches and ranks beside the parameter."
            " Change parameter.grad in a callback's on_before_optimizer_step."
        )


def _share(parameter: DTensor, places: tuple[tuple[nn.Module, str], ...]) -> Share:
    over_ranks, *over_tensor = parameter.placements
    shape = list(parameter.shape)
    for place in over_tensor:
        if isinstance(place, Shard):
            shape[place.dim] //= parameter.device_mesh.size(1)
    dim = cast(Shard, over_ranks).dim
    ranks = parameter.device_mesh.size(0)
    is_part = any(place.is_replicate() for place in over_tensor)
    return Share(places, tuple(shape), dim, -(-shape[dim] // ranks), is_part)


def parts_of(gradient: Tensor, place: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of a gradient, and where each goes in ``place``: [ranks, then the dims of a chunk]."""
    rows = place.shape[1 + dim]
    full, rest = divmod(gradient.shape[dim], rows)
    even = gradient.narrow(dim, 0, full * rows)
    yield even.unflatten(dim, (full, rows)).movedim(dim, 0), place[:full]
    if rest:
        yield gradient.narrow(dim, full * rows, rest), place[full].narrow(dim, 0, rest)
