"""What a run says of its model, once, and what its progress bar shows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar

from lightning_wlb.cost.flops import Work
from lightning_wlb.strategy.split_model import WholeModelSummary
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, SMALL_TIED, Case, data, module, trainer


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Bar(RichProgressBar):
    """Keeps its descriptions, on rank 0, where it is drawn."""

    said: str | None = None

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if self.progress is not None and self.train_progress_bar_id is not None:
            self.said = self.progress.tasks[self.train_progress_bar_id].description


def fit(case: Case, max_epochs: int) -> tuple[list[str], str | None]:
    heard, bar = Heard(), Bar()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(heard)
    try:
        runner = trainer(
            WLBStrategy(1, 2),
            2,
            max_steps=1,
            max_epochs=max_epochs,
            callbacks=[bar, RichModelSummary()],
            enable_progress_bar=True,
            enable_model_summary=True,
        )
        runner.fit(module(case), data(case))
        assert sum(isinstance(each, WholeModelSummary) for each in runner.callbacks) == 1
        assert not any(isinstance(each, ModelSummary) for each in runner.callbacks)
    finally:
        logger.removeHandler(heard)
    return [text for text in heard.texts if "parameters" in text], bar.said


def run(rank: int) -> list[tuple[list[str], str | None]]:
    return [fit(SMALL, -1), fit(SMALL_TIED, 3)]


@pytest.fixture(scope="module")
def shown() -> list[list[tuple[list[str], str | None]]]:
    return run_ranks(run, 2, process_group=False)


def test_the_whole_model_is_described_once(shown) -> None:
    for case, said, silent in zip((SMALL, SMALL_TIED), *shown, strict=True):
        whole = module(case)
        whole.configure_model()
        count = sum(each.numel() for each in whole.parameters())
        work = Work.of(whole.model_shape)
        (text,) = said[0]
        assert text.startswith(f"LanguageModule: {count:,} parameters; on the ranks of a pipeline ")
        assert text.endswith(
            f"; a document of 32 tokens takes {work.forward(32):.3g} FLOPs forward and"
            f" {work.backward(32):.3g} backward."
        )
        assert silent == ([], None)


def test_the_bar_has_no_end_where_epochs_have_none(shown) -> None:
    endless, three = shown[0]
    assert endless[1] is not None
    assert endless[1].strip().endswith("Epoch 0")
    assert three[1] is not None
    assert three[1].strip().endswith("Epoch 0/2")
