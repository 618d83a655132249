"""Checkpoints of a run: the half of WLBStrategy that saves them and resumes from them.

Lightning hands over what is the same on every rank (loops, callbacks, schedulers, the data module's
state), and leaves weights and optimizer state to the strategy, because no rank has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_wlb.checkpoints import sharded
from lightning_wlb.strategy.checks import local_path
from lightning_wlb.strategy.gradients import Tie
from lightning_wlb.strategy.launch import MeshStrategy
from lightning_wlb.strategy.mesh import Size


class CheckpointStrategy(MeshStrategy):
    """A mesh of processes that writes one checkpoint together, and reads it on any mesh.

    Arguments are those of :class:`.MeshStrategy`.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        virtual_stages: int,
        process_group_backend: str | None,
        timeout: timedelta | None,
    ) -> None:
        super().__init__(sizes, virtual_stages, process_group_backend, timeout)
        self._ties: list[Tie] = []

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the shards must exist before they can be filled."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: :meth:`load_checkpoint` restores optimizers too."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: :meth:`save_checkpoint` collects the weights itself."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: :meth:`save_checkpoint` collects optimizer state itself."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing left to do after :meth:`load_checkpoint`."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing left to do after :meth:`load_checkpoint`."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a sharded checkpoint folder; collective over all ranks."""
        if storage_options is not None:
            raise TypeError(
                "WLBStrategy.save_checkpoint does not take storage_options: it writes through"
                " torch.distributed.checkpoint, not through a CheckpointIO."
            )
        weights_only = "optimizer_states" not in checkpoint
        checkpoint.pop("state_dict", None)
        checkpoint.pop("optimizer_states", None)
        assert self.lightning_module is not None
        sharded.save(
            local_path(self.broadcast(filepath)),
            self.lightning_module,
            [] if weights_only else self.optimizers,
            checkpoint,
            self._renamed(),
        )

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a sharded checkpoint folder into model and optimizers; collective."""
        module = self.lightning_module
        assert module is not None
        # A validation after fit reads weights, and leaves the optimizers alone.
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        return sharded.load(
            local_path(self.broadcast(checkpoint_path)),
            module,
            self.optimizers if fitting else [],
            self._renamed(),
            weights_only,
        )

    def _tied_copies(self) -> list[Tie]:
        """The ties whose head is here and whose embedding is on another stage."""
        return self._ties if self.rank.last_stage and not self.rank.first_stage else []

    def _renamed(self) -> dict[str, str]:
        """A tied head on a stage of its own goes by the embedding's name in checkpoints."""
        return {f"model.{tie.head}": f"model.{tie.embedding}" for tie in self._tied_copies()}
