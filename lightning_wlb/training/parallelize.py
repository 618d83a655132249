"""Turns a whole model into one rank's share of it, one parallelism after the other.

1. Pipeline: keep this rank's layers and ends; the rest was never materialised.
2. Tensor: place every weight on the tensor axis, in its own shard.
3. Fully sharded data parallel over data × context.
4. Give the shards memory, and fill them from the weights or by (parameter name, seed).

Up to step 4 a model on the meta device has no memory, so that a rank never holds more than its own
shards and the values from which it fills one of them.

Tied embeddings on different stages are two copies of a weight, sharded alike, each with a part of
the gradient. In every step the two ends exchange their shards of the gradient and add them, so that
identical optimizers keep the copies identical.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_wlb.distributed.process_groups import data_context, message_device
from lightning_wlb.mesh import Rank
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.tensor_parallel import held, shard_parameters
from lightning_wlb.training.gather_and_reduce import ParameterBuckets
from lightning_wlb.training.sharded_parameters import Bucket, refuse_hooks, shard_over


def parallelize(
    model: Decoder,
    mesh: DeviceMesh,
    stages: list[range],
    group: dist.ProcessGroup,
    *,
    initialise: Callable[[], None],
    device: torch.device,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    sum_dtype: torch.dtype,
) -> ParameterBuckets:
    """Turn the whole model, on the meta device or not, into this rank's share of it, in place.

    Returns the object that gathers the parameters in a step.

    Args:
        stages: layers of every pipeline stage; stage s is on place ``s % P`` of the axis.
        group: the ranks that share the parameters; :class:`.ParameterBuckets` alone uses it.
        initialise: fills every parameter of the module with its first value. Parameters are
            DTensors then, of any placement (:func:`.tensor_parallel.assign`).

    Raises:
        ValueError: a buffer has no values; or a parameter is shared by two layers, by several
            pipeline stages, or by the two ends although ``model.tied`` does not name it.
    """
    place, places = mesh["pipeline"].get_local_rank(), mesh["pipeline"].size()
    check_parameters(model, places)
    keep_stages(model, stages, place, places)

    tensor_mesh = mesh["tensor"]
    if tensor_mesh.size() > 1:
        shard_parameters(model, tensor_mesh, model.tensor_parallel_plan(tensor_mesh.size()))

    deferred = any(parameter.is_meta for parameter in model.parameters())
    if deferred:
        refuse_empty_buffers(model)
    convert_tensors(
        model,
        lambda tensor: tensor.to(
            None if tensor.is_meta else device,
            # Buffers keep their dtype: rotary tables would lose digits in bfloat16.
            dtype if isinstance(tensor, nn.Parameter) else None,
        ),
    )
    shard_over(model, data_context(mesh))
    if deferred:
        convert_tensors(
            model,
            lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor,
        )
        initialise()
    buckets = _buckets(model, dict(list(enumerate(stages))[place::places]))
    tensor_group = tensor_mesh.get_group() if tensor_mesh.size() > 1 else None
    return ParameterBuckets(buckets, group, tensor_group, compute_dtype, sum_dtype)


def keep_stages(model: Decoder, stages: list[range], rank: int, ranks: int) -> None:
    """Drop the layers and ends that other ranks own; names keep their global layer number."""
    mine = {layer for stage in stages[rank::ranks] for layer in stage}
    for name in list(model.layers):
        if int(name) not in mine:
            del model.layers[name]
    if rank != 0:
        model.embed = None  # the model's forward skips an absent end
    if rank != (len(stages) - 1) % ranks:
        model.head = None


def _buckets(model: Decoder, stages: dict[int, range]) -> list[Bucket]:
    """Every layer, the two ends and the rest of the model, each a bucket, in order of first use.

    Ends that are tied on one rank are one bucket.
    """
    first, last = min(stages), max(stages)
    ends = [end for end in (model.embed, model.head) if isinstance(end, nn.Module)]
    parts: list[tuple[list[nn.Module], list[int]]] = []
    if model.tied and len(ends) == 2:
        parts.append((ends, [first, last]))
    elif model.embed is not None:
        parts.append(([model.embed], [first]))
    for stage, layers in stages.items():
        parts.extend(([model.layers[str(number)]], [stage]) for number in layers)
    if model.head is not None and not (model.tied and len(ends) == 2):
        parts.append(([model.head], [last]))
    inside = [[each for whole in modules for each in whole.modules()] for modules, _ in parts]
    known = {id(each) for modules in inside for each in modules}
    others = [each for each in model.modules() if id(each) not in known]
    buckets = [Bucket.of([model], list(stages), others)]
    buckets += [
        Bucket.of(modules, own, all_) for (modules, own), all_ in zip(parts, inside, strict=True)
    ]
    return [each for each in buckets if each.parameters]


def check_parameters(model: Decoder, pipeline: int) -> None:
    """Raise ValueError for parameters that several stages would train, and hooks that never run.

    It runs on the whole model: later a rank does not see the layers of other stages.
    """
    owners: dict[int, set[str]] = defaultdict(set)
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        refuse_hooks(name, parameter)
        part, *inside = name.split(".")
        if part not in ("embed", "layers", "head"):
            part = "neither"
            if pipeline > 1 and parameter.requires_grad:
                raise ValueError(
                    f"{type(model).__name__}: {name} is in none of embed, layers and head, so each"
                    f" of {pipeline} pipeline stages would train a copy of its own. Move it into"
                    " one of them, or use pipeline_parallel_size=1."
                )
        own = owners[id(parameter)]
        own.add(f"layer {inside[0]}" if part == "layers" else part)
        if len(own) > 1 and own != {"embed", "head"}:
            raise ValueError(
                f"{type(model).__name__}: the parameter {name} is in two layers, or in a layer and"
                " an end. Only the embedding and the head may share one: give each layer its own."
            )
        if len(own) > 1 and {name, first[id(parameter)]} not in map(set, model.tied.items()):
            raise ValueError(
                f"{type(model).__name__}: {name} is the parameter {first[id(parameter)]}, which its"
                " property tied does not say, so pipeline stages would train two. Let tied return"
                " {name in the head: name in the embedding}."
            )
        first.setdefault(id(parameter), name)


def refuse_empty_buffers(model: nn.Module) -> None:
    """Raise ValueError for buffers that were made on the meta device: nothing fills them."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise ValueError(
            f"Buffers on the meta device lack values: {', '.join(empty)}. Compute them in forward,"
            " as lightning_wlb.Transformer does its rotary embedding, or use device='cpu'."
        )


def convert_tensors(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
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


def add_tied_gradients(model: Decoder, rank: Rank, group: dist.ProcessGroup | None) -> None:
    """Add the other end's gradient shard to this one's, for every tied weight of two stages.

    Collective over the two ends; gradients have been reduced already. ``group`` is the pipeline's.
    """
    if rank.first_stage == rank.last_stage:
        return
    peer = rank.group("pipeline")[-1 if rank.first_stage else 0]
    parameters = dict(model.named_parameters())
    for head, embedding in model.tied.items():
        mine = parameters[embedding if embedding in parameters else head]
        if not mine.requires_grad:
            continue
        assert mine.grad is not None, "the final reduction gives every parameter a gradient"
        gradient = held(mine.grad)
        assert group is not None
        sent = gradient.contiguous().to(message_device(gradient.device, group))
        other = torch.empty_like(sent)
        sending = dist.P2POp(dist.isend, sent, peer, group)
        receiving = dist.P2POp(dist.irecv, other, peer, group)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        gradient.add_(other.to(gradient.device))
