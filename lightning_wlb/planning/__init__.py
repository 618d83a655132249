"""Document lengths in, step plans out: pure, deterministic, without tensors."""

from lightning_wlb.planning.planner import Planner
from lightning_wlb.planning.settings import DataSettings

__all__ = ["DataSettings", "Planner"]
