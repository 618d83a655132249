"""What a run says of its model, once, and what its progress bar shows."""

from __future__ import annotations

import logging

from lightning.pytorch.callbacks import ModelSummary, RichModelSummary

from lightning_wlb.cost.flops import Work
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


def fit(case: Case) -> list[str]:
    heard = Heard()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(heard)
    table = {"callbacks": [RichModelSummary()], "enable_model_summary": True}
    runner, model = trainer(WLBStrategy(1, 2), 2, max_steps=1, **table), module(case)
    try:
        for _ in range(2):
            runner.fit(model, data(case))
        assert not any(isinstance(each, ModelSummary) for each in runner.callbacks)
    finally:
        logger.removeHandler(heard)
    return [text for text in heard.texts if "parameters" in text]


def run(rank: int) -> list[list[str]]:
    return [fit(SMALL), fit(SMALL_TIED)]


def test_the_whole_model_is_described_once() -> None:
    for case, said, silent in zip(
        (SMALL, SMALL_TIED), *run_ranks(run, 2, process_group=False), strict=True
    ):
        whole = module(case)
        whole.configure_model()
        count = sum(each.numel() for each in whole.parameters())
        work = Work.of(whole.model_shape)
        assert said == [
            f"LanguageModule: {count:,} parameters; a document of 32 tokens takes"
            f" {work.forward(32):.3g} FLOPs forward and {work.backward(32):.3g} backward."
        ]
        assert silent == []
