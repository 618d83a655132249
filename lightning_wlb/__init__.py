"""Workload-balanced long-context training for PyTorch Lightning.

Importing this package registers the strategy ``"wlb"``: ``Trainer(strategy="wlb")``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_wlb.callbacks import ImbalanceMonitor
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.documents import DocumentStore, InMemoryDocuments
from lightning_wlb.data.opening import documents
from lightning_wlb.data.sampler import StepDataset, StepLoader
from lightning_wlb.data.stdlib import StdlibDocuments
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Slice, StepPlan
from lightning_wlb.planning import DataSettings
from lightning_wlb.strategy.wlb import WLBStrategy

__all__ = [
    "DataSettings",
    "DocumentStore",
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
