"""What a Trainer shows of a run, where Lightning's own would be wrong under :class:`.WLBStrategy`.

* Lightning's table of the model has the parameters of rank 0's stage, and 0 FLOPs, since it has
  measured none. In its place stand those of the whole model.
* With ``max_epochs=-1`` its progress bar of the rich library says ``Epoch 0/-2``; here ``Epoch 0``.

Cost: one exchange of two numbers at the start of fit.
"""

from __future__ import annotations

from collections.abc import Collection

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar
from lightning.pytorch.utilities import rank_zero_info

from lightning_wlb.cost.flops import Work
from lightning_wlb.distributed.process_groups import gather_from_all_ranks
from lightning_wlb.mesh import Rank
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.planning import DataSettings


class Display(pl.Callback):
    """Describes the model when training starts, and mends the progress bar.

    Args:
        rank: where this rank stands in the mesh.
        copies: parameters of the module that another stage has, too: the head that is tied to it.
        summary: whether to describe the model.
    """

    def __init__(self, rank: Rank, copies: Collection[str], summary: bool) -> None:
        self.rank, self.copies, self.summary = rank, copies, summary

    @staticmethod
    def take_over(trainer: pl.Trainer, rank: Rank, copies: Collection[str]) -> None:
        """Take the place of Lightning's tables among a Trainer's callbacks, as often as it runs."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        tables = [each for each in callbacks if type(each) in (ModelSummary, RichModelSummary)]
        earlier = [each for each in callbacks if isinstance(each, Display)]
        for each in (*tables, *earlier):
            callbacks.remove(each)
        summary = bool(tables) or any(each.summary for each in earlier)
        callbacks.append(Display(rank, copies, summary))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what is trained; collective over all ranks."""
        if self.summary:
            assert isinstance(pl_module, LanguageModule)
            settings = getattr(trainer.datamodule, "settings", None)  # type: ignore[attr-defined]
            window = settings.context_window if isinstance(settings, DataSettings) else None
            rank_zero_info(self._describe(pl_module, window))

    def _describe(self, module: LanguageModule, window: int | None) -> str:
        own = [each for name, each in module.named_parameters() if name not in self.copies]
        numbers = [sum(each.numel() for each in own)]
        numbers.append(sum(each.numel() for each in own if each.requires_grad))
        mine = torch.tensor(numbers, dtype=torch.int64, device=module.device)
        everyone = gather_from_all_ranks(mine).tolist()
        stages = [everyone[rank] for rank in self.rank.group("pipeline")]
        total, trained = map(sum, zip(*stages, strict=True))
        said = f"{type(module).__name__}: {total:,} parameters"
        if trained < total:
            said += f", {trained:,} of them trained"
        if len(stages) > 1:
            said += f"; on the ranks of a pipeline {', '.join(f'{each[0]:,}' for each in stages)}"
        if window is not None:
            work = Work.of(module.model_shape)
            said += (
                f"; a document of {window:,} tokens takes {work.forward(window):.3g} FLOPs forward"
                f" and {work.backward(window):.3g} backward"
            )
        return f"{said}."

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the end out of the number of epochs where there is none."""
        bar = trainer.progress_bar_callback
        if (
            isinstance(bar, RichProgressBar)
            and trainer.max_epochs == -1
            and bar.progress is not None
            and bar.train_progress_bar_id is not None
        ):
            task = bar.progress.tasks[bar.train_progress_bar_id]
            bar.progress.update(task.id, description=task.description.replace("/-2", ""))
