"""Whether a model may be built anew: steps on pipelines of their own run stages that are.

A rank has its mesh's stage of the model alone. The stage that it runs elsewhere is made by
``build_model`` once more, and gets its parameters from where they rest
(:mod:`~lightning_wlb.heterogeneous.pipelines`). What was done to the model after it was built, and
buffers that were read with its weights, would be missing there without a word.

Cost: the model is looked through by name, once a run.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.training.parallelize import refuse_empty_buffers


def check_rebuilt(module: LanguageModule, rebuilt: Decoder) -> None:
    """Refuse a model of which steps on pipelines of their own would run another one.

    Such steps run stages of what ``build_model`` makes, since a rank has only its mesh's stage of
    the model, with parameters from where they rest.

    Args:
        module: its model may have been split.
        rebuilt: what ``build_model`` makes, whole, on the meta device.

    Raises:
        MisconfigurationException: naming the module or parameter. Another rank may have no such.
    """
    assert module.model is not None
    built = dict(_contents(rebuilt))
    changed = [name for name, each in _contents(module.model) if built.get(name) != each]
    if changed:
        raise MisconfigurationException(
            f"WLBStrategy(dynamic=...): {changed[0]} of the model is not as"
            f" {type(module).__name__}.build_model makes it, but steps on other pipelines run"
            " stages that are built anew. Change the model in build_model: replace modules, and"
            " freeze parameters, there; or use dynamic='off'."
        )


def check_buffers(rebuilt: Decoder) -> None:
    """Refuse a model whose buffers have no values, or other ones, once it is built anew.

    Raises:
        ValueError: naming a buffer, the same on all ranks.
    """
    refuse_empty_buffers(rebuilt)
    kept = [
        f"{path}.{name}"
        for path, each in rebuilt.named_modules()
        for name, buffer in each._buffers.items()
        if buffer is not None and name not in each._non_persistent_buffers_set
    ]
    if kept:
        raise ValueError(
            f"{kept[0]} is a buffer that belongs to the model's weights, and a rank has those of"
            " its mesh's stage only. Make it a parameter, or register it with persistent=False"
            " where build_model computes it; else use dynamic='off'."
        )


def _contents(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Modules by their type, parameters by shape and whether they are trained."""
    for name, module in model.named_modules():
        yield name or "the whole", type(module)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, (parameter.shape, parameter.requires_grad)
