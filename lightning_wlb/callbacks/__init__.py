"""Lightning callbacks: how evenly the mesh works, measured."""

from lightning_wlb.callbacks.monitor import ImbalanceMonitor

__all__ = ["ImbalanceMonitor"]
