"""FSDP2 over a step of many micro-batches: gather once, accumulate, reduce once.

``fully_shard`` by itself reduces after every backward and takes the mean over its ranks. A step
here runs many forwards and backwards in an order that FSDP does not know, divides the loss by the
*global* number of target tokens, and must end with the *sum* of all ranks' gradients, also where a
rank has no micro-batch at all. So :func:`shard` makes every reduction a plain sum,
:func:`begin_step` turns reduction off, and :func:`finish_step` makes the only one.

:func:`finish_step` goes through private functions, as torch's own pipelining does
(``PipelineStage.perform_reduce_grad``): autograd fires FSDP's reduction only inside a backward,
and a rank without micro-batches has none. tests/strategy/test_fsdp.py pins it.

Cost: within a step this is ZeRO-1. A rank holds its stage's parameters whole in the compute
dtype and their gradients whole in fp32: 6 bytes per parameter in bf16. Not for models whose
stage does not fit that way; use more pipeline or tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard


def shard(
    model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> None:
    """Apply ``fully_shard`` to each unit and to the model, with sums in place of means.

    Args:
        model: the stage's model, the FSDP root.
        units: modules inside it that gather and reduce as a whole: its layers and its ends.
        mesh: the one-axis mesh to shard over.
        policy: parameter and reduction dtypes.
    """
    for unit in [*units, model]:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=False,
            shard_placement_fn=lambda parameter: _split_dim(parameter, mesh.size()),
            mp_policy=policy,
        )
    for module in fsdp_modules(model):
        # On every module: the factor alone divides on backends without a pre-multiplied sum, and
        # on the root alone the layers would still average.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _split_dim(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Which dim of a parameter to shard, where the first is too short; None for the first.

    With two rows, as of a packed projection or a low-rank adapter, two ranks would hold all of it.
    FSDP wants equal shares of any dim but the first.
    """
    shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
    if not shape or shape[0] >= ranks:
        return None
    even = [dim for dim, size in enumerate(shape) if size % ranks == 0 and size]
    return Shard(even[0]) if even else None


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every module of the model that ``fully_shard`` was applied to, root included."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def begin_step(model: nn.Module) -> None:
    """Gather all parameters and let gradients accumulate unreduced until :func:`finish_step`.

    Gradients that a step has left which did not finish are dropped.
    """
    root = _root_state(model)
    # Forced, so that a rank that runs no forward joins the same collectives.
    root._lazy_init()
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(False, recurse=False)
        module.set_reshard_after_backward(False, recurse=False)
        module.set_is_last_backward(False)
    for module in fsdp_modules(model):
        module.unshard()
    for parameter in _parameters(root):
        parameter._unsharded_param.grad = None
        parameter.unsharded_accumulated_grad = None


def finish_step(model: nn.Module) -> None:
    """Reduce the accumulated gradients, set the sharded ``.grad`` and free what was gathered.

    Collective over the mesh that the model is sharded over.
    """
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_reshard_after_backward(True, recurse=False)
        module.set_is_last_backward(True)
    root = _root_state(model)
    with torch.no_grad():
        for parameter in _parameters(root):
            _fill(parameter)
        for parameters in _parameter_groups(root):
            parameters.post_backward()
        root._root_post_backward_final_callback()


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters without touching gradients, after an evaluation step.

    The next forward would silently use the weights from before the optimizer step.
    """
    for module in fsdp_modules(model):
        module.reshard()


def _root_state(model: nn.Module) -> Any:
    assert isinstance(model, FSDPModule)
    return model._get_fsdp_state()


def _parameter_groups(root: Any) -> Iterator[Any]:
    """FSDP's units of communication: torch 2.13 has a list for each state, torch 2.11 one."""
    for state in root._state_ctx.all_states:
        if hasattr(state, "_fsdp_param_groups"):
            yield from state._fsdp_param_groups
        elif state._fsdp_param_group is not None:
            yield state._fsdp_param_group


def _parameters(root: Any) -> Iterator[Any]:
    return (
        parameter for parameters in _parameter_groups(root) for parameter in parameters.fsdp_params
    )


def _fill(parameter: Any) -> None:
    """Give a parameter without gradient a zero one, in the dtype of reduction.

    FSDP leaves such a parameter out of the reduction, and a rank without micro-batches would let
    the others wait. (torch 2.13 has set_reduce_scatter_unused_params for it, torch 2.11 not.)
    A frozen parameter has none on any rank.
    """
    if not parameter.sharded_param.requires_grad:
        return
    gathered = parameter._unsharded_param
    if gathered.grad is None and parameter.unsharded_accumulated_grad is None:
        gathered.grad = torch.zeros_like(gathered)
        parameter.to_accumulated_grad_if_needed()
