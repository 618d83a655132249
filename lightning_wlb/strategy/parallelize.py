"""The order in which parallelisms are applied to a model, in one function.

1. Pipeline: keep this rank's layers and ends; the rest was never materialised.
2. Tensor: place every weight on the tensor axis, in its own shard.
3. Fully sharded data parallel over data × context, per layer and root.
4. Give the shards memory, in the dtype of rest, and fill them by (parameter name, seed or weights).

Up to step 4 a model on the meta device has no memory, so that a rank never holds more than its own
shards and what it fills one of them from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.tensor_parallel import shard_parameters
from lightning_wlb.strategy import fsdp
from lightning_wlb.strategy.gradients import Tie, find_ties
from lightning_wlb.strategy.mesh import data_context


def parallelize(
    model: Decoder,
    mesh: DeviceMesh,
    stages: list[range],
    *,
    initialise: Callable[[], None],
    device: torch.device,
    dtype: torch.dtype,
    policy: MixedPrecisionPolicy,
) -> list[Tie]:
    """Turn the whole model, on the meta device or not, into this rank's share of it, in place.

    Args:
        model: whole.
        mesh: from :func:`~lightning_wlb.strategy.mesh.device_mesh`.
        stages: layers of every pipeline stage; stage s is on place ``s % P`` of the axis.
        initialise: fills every parameter of the module with its first value. Parameters are
            DTensors then, of any placement (:func:`.initialise.assign`).
        device: where the parameters live.
        dtype: of the parameters at rest.
        policy: what FSDP2 casts to.

    Returns:
        The weights that the model's two ends share.
    """
    ties = find_ties(model)
    keep_stages(model, stages, mesh["pipeline"].get_local_rank(), mesh["pipeline"].size())

    tensor_mesh = mesh["tensor"]
    if tensor_mesh.size() > 1:
        shard_parameters(model, tensor_mesh, model.tensor_parallel_plan(tensor_mesh.size()))

    deferred = any(parameter.is_meta for parameter in model.parameters())
    if deferred:
        _refuse_empty_buffers(model)
    _replace_parameters(
        model,
        lambda tensor: tensor.to(
            None if tensor.is_meta else device,
            # Buffers keep their dtype: rotary tables would lose digits in bfloat16.
            dtype if isinstance(tensor, nn.Parameter) else None,
        ),
    )
    fsdp.shard(model, _units(model, ties), data_context(mesh), policy)
    if deferred:
        # FSDP looks for the new parameters when it first gathers.
        _replace_parameters(
            model,
            lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor,
        )
        initialise()
    return ties


def keep_stages(model: Decoder, stages: list[range], rank: int, ranks: int) -> None:
    """Drop the layers and ends that other ranks own. Names keep their global layer number."""
    mine = {layer for stage in stages[rank::ranks] for layer in stage}
    for name in list(model.layers):
        if int(name) not in mine:
            del model.layers[name]
    if rank != 0:
        model.embed = None  # an absent end is passed through
    if rank != (len(stages) - 1) % ranks:
        model.head = None


def _units(model: Decoder, ties: list[Tie]) -> list[nn.Module]:
    """What gathers and reduces as a whole: every layer, and the two ends unless they are tied.

    FSDP2 does not share a parameter between units, so tied ends on one stage go to the root.
    """
    ends = [end for end in (model.embed, model.head) if isinstance(end, nn.Module)]
    if ties and len(ends) == 2:
        ends = []
    return [*model.layers.values(), *ends]


def _refuse_empty_buffers(model: nn.Module) -> None:
    """Raise ValueError for buffers that were made on the meta device: nothing fills them."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise ValueError(
            f"Buffers on the meta device would have no values: {', '.join(empty)}. Compute them in"
            " forward, as lightning_wlb.Transformer does its rotary embedding, or make them with"
            " device='cpu'."
        )


def _replace_parameters(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer; one that two modules share stays shared.

    ``Module.to_empty`` and ``Module.to`` would untie it.
    """
    done: dict[int, Tensor] = {}
    with torch.no_grad():
        for module in model.modules():
            for kind in (module._parameters, module._buffers):
                for name, tensor in list(kind.items()):
                    if tensor is None:
                        continue
                    if id(tensor) not in done:
                        new = convert(tensor)
                        if isinstance(tensor, nn.Parameter):
                            new = nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)
                        done[id(tensor)] = new
                    kind[name] = done[id(tensor)]  # type: ignore[assignment]
