"""Workload-balanced long-context training: a planner for every loop, and a Lightning strategy.

Importing this package needs numpy only and loads none of its modules: each name is imported when it
is first used (PEP 562). When Lightning is imported, before or after, ``Trainer(strategy="wlb")`` is
registered, and ModelCheckpoint no longer resolves a ``dirpath`` behind a stranger's link.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from stat import S_ISLNK
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

    from lightning_wlb.adapters.plan_step import plan_step as plan_step
    from lightning_wlb.callbacks.monitor import ImbalanceMonitor as ImbalanceMonitor
    from lightning_wlb.cli.train import WLBCLI as WLBCLI
    from lightning_wlb.data.datamodule import WLBDataModule as WLBDataModule
    from lightning_wlb.data.loader import StepDataset as StepDataset
    from lightning_wlb.data.loader import StepLoader as StepLoader
    from lightning_wlb.data.open_documents import documents as documents
    from lightning_wlb.data.stores.document_store import DocumentStore as DocumentStore
    from lightning_wlb.data.stores.in_memory import InMemoryDocuments as InMemoryDocuments
    from lightning_wlb.data.stores.python_stdlib import StdlibDocuments as StdlibDocuments
    from lightning_wlb.models.config import TransformerConfig as TransformerConfig
    from lightning_wlb.models.decoder import Decoder as Decoder
    from lightning_wlb.models.huggingface.huggingface_module import (
        HuggingFaceModule as HuggingFaceModule,
    )
    from lightning_wlb.models.language_module import LanguageModule as LanguageModule
    from lightning_wlb.models.transformer import Transformer as Transformer
    from lightning_wlb.plan import MicroBatch as MicroBatch
    from lightning_wlb.plan import Piece as Piece
    from lightning_wlb.plan import ReplicaPlan as ReplicaPlan
    from lightning_wlb.plan import Slice as Slice
    from lightning_wlb.plan import StepPlan as StepPlan
    from lightning_wlb.planning import DataSettings as DataSettings
    from lightning_wlb.planning.balanced_step import BalancedStep as BalancedStep
    from lightning_wlb.strategy.wlb import WLBStrategy as WLBStrategy

_HOMES = {
    "adapters.plan_step": ["plan_step"],
    "callbacks.monitor": ["ImbalanceMonitor"],
    "cli.train": ["WLBCLI"],
    "data.datamodule": ["WLBDataModule"],
    "data.loader": ["StepDataset", "StepLoader"],
    "data.open_documents": ["documents"],
    "data.stores.document_store": ["DocumentStore"],
    "data.stores.in_memory": ["InMemoryDocuments"],
    "data.stores.python_stdlib": ["StdlibDocuments"],
    "models.config": ["TransformerConfig"],
    "models.decoder": ["Decoder"],
    "models.huggingface.huggingface_module": ["HuggingFaceModule"],
    "models.language_module": ["LanguageModule"],
    "models.transformer": ["Transformer"],
    "plan": ["MicroBatch", "Piece", "ReplicaPlan", "Slice", "StepPlan"],
    "planning": ["DataSettings"],
    "planning.balanced_step": ["BalancedStep"],
    "strategy.wlb": ["WLBStrategy"],
}
"""The package's names, by the module that defines them."""

__all__ = [name for names in _HOMES.values() for name in names]

_EXTRAS = {"transformers": "hf", "safetensors": "hf", "peft": "hf", "datasets": "hf"}
_STRATEGIES = "lightning.pytorch.strategies"


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            try:
                found = getattr(import_module(f"{__name__}.{home}"), name)
            except ModuleNotFoundError as error:
                missing = (error.name or "").partition(".")[0]
                if missing == __name__:
                    raise
                extra = _EXTRAS.get(missing, "train")
                raise ModuleNotFoundError(
                    f"{name} needs {missing}: pip install 'lightning-wlb[{extra}]'", name=error.name
                ) from error
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register(strategies: ModuleType) -> None:
    """Make ``"wlb"`` known to Lightning, which asks for the class when a Trainer names it."""

    def wlb(**options: Any) -> WLBStrategy:
        from lightning_wlb.strategy.wlb import WLBStrategy

        return WLBStrategy(**options)

    strategies.StrategyRegistry.register(
        "wlb", wlb, description="Workload-balanced data x pipeline x context x tensor parallelism"
    )
    from lightning.pytorch.callbacks import ModelCheckpoint

    resolve = ModelCheckpoint._ModelCheckpoint__init_ckpt_dir  # type: ignore[attr-defined]

    def keep_links(self: ModelCheckpoint, dirpath: Any, filename: Any) -> None:
        """Keep a stranger's link in ``dirpath``, so that WLBStrategy can refuse it."""
        from lightning_wlb.file_checks import follow

        resolve(self, dirpath, filename)
        given = os.path.expanduser(dirpath or "")
        if given and "://" not in given:
            # One call judges and resolves the links: a stranger could exchange them between two.
            real, strange = follow(given)
            links = any(S_ISLNK(each.st_mode) for each in strange.values())
            self.dirpath = os.path.join(os.getcwd(), given) if links else str(real)

    ModelCheckpoint._ModelCheckpoint__init_ckpt_dir = keep_links  # type: ignore[attr-defined]


class _WhenLightningComes(MetaPathFinder):
    """Registers the strategy once Lightning's registry has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of Lightning's registry, with a loader that also registers the strategy."""
        if name != _STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register(module)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


if (_imported := sys.modules.get(_STRATEGIES)) is not None:
    _register(_imported)
else:
    sys.meta_path.insert(0, _WhenLightningComes())
