"""Workload-balanced long-context training for PyTorch Lightning.

Importing this package registers the strategy ``"wlb"``: ``Trainer(strategy="wlb")``.
"""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_wlb.callbacks import ImbalanceMonitor
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.loader import StepDataset, StepLoader
from lightning_wlb.data.open_documents import documents
from lightning_wlb.data.stores.document_store import DocumentStore
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.data.stores.python_stdlib import StdlibDocuments
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Slice, StepPlan
from lightning_wlb.planning import DataSettings
from lightning_wlb.strategy.wlb import WLBStrategy

if TYPE_CHECKING:
    from lightning_wlb.cli.train import WLBCLI
    from lightning_wlb.models.huggingface.huggingface_module import HuggingFaceModule

__all__ = [
    "WLBCLI",
    "DataSettings",
    "Decoder",
    "DocumentStore",
    "HuggingFaceModule",
    "ImbalanceMonitor",
    "InMemoryDocuments",
    "LanguageModule",
    "MicroBatch",
    "Piece",
    "ReplicaPlan",
    "Slice",
    "StdlibDocuments",
    "StepDataset",
    "StepLoader",
    "StepPlan",
    "Transformer",
    "TransformerConfig",
    "WLBDataModule",
    "WLBStrategy",
    "documents",
]

StrategyRegistry.register(
    WLBStrategy.strategy_name,
    WLBStrategy,
    description="Workload-balanced data x pipeline x context x tensor parallelism",
)


def __getattr__(name: str) -> Any:
    # Both take seconds to import, and transformers is an extra.
    if name == "WLBCLI":
        from lightning_wlb.cli.train import WLBCLI

        return WLBCLI
    if name == "HuggingFaceModule":
        try:
            from lightning_wlb.models.huggingface.huggingface_module import HuggingFaceModule
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"HuggingFaceModule needs {error.name}: pip install 'lightning-wlb[hf]'",
                name=error.name,
            ) from error
        return HuggingFaceModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
