"""Options of a Trainer that steps planned from documents cannot follow: refused, with what can.

Lightning takes a fraction (``limit_train_batches=0.5``) of the length of a loader. A step loader
has none, since steps are planned as documents arrive, so a fraction is refused with the number of
steps that it would about be. ``overfit_batches`` would repeat a loader's first batches, and
``predict`` would hand out what one rank computed of documents that several share.

Cost: one pass over the lengths, and only where something is refused.
"""

from __future__ import annotations

from typing import NoReturn

import lightning.pytorch as L
import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.data.documents import DocumentStore
from lightning_wlb.data.mixture import MixedDocuments
from lightning_wlb.planning import DataSettings


def refuse_overfitting(trainer: L.Trainer) -> None:
    """Raise MisconfigurationException where a Trainer asks for the same batches again and again."""
    if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
        raise MisconfigurationException(
            f"Trainer(overfit_batches={trainer.overfit_batches}) would repeat batches of a loader,"  # type: ignore[attr-defined]
            " but each step is planned from the documents that come next. To overfit, give"
            " WLBDataModule a few documents; to stop epochs early, use limit_train_batches."
        )


def refuse_fractions(
    trainer: L.Trainer, store: DocumentStore, settings: DataSettings, *names: str
) -> None:
    """Refuse options that are a fraction of an epoch over the documents.

    Args:
        trainer: whose options they are.
        store: the documents that the epoch passes.
        settings: which of them enter a step.
        names: of the options.

    Raises:
        MisconfigurationException: with the number of steps that the fraction is about.
    """
    for name in names:
        value = getattr(trainer, name)
        if not isinstance(value, float) or value in (0.0, 1.0):
            continue
        steps = about_steps(store, settings)
        counted = (
            ""
            if steps is None
            else f": an epoch has about {steps}, so {name}={max(round(value * steps), 1)}"
        )
        raise MisconfigurationException(
            f"Trainer({name}={value}) is a fraction of an epoch, whose steps are planned as"
            f" documents arrive and not counted beforehand. Give a whole number of steps{counted}."
        )


def about_steps(store: DocumentStore, settings: DataSettings) -> int | None:
    """Steps of an epoch if each took its N · C tokens; None for a mixture, whose epoch is longer.

    Packings that hold documents back or fill micro-batches with what fits take a few more.
    """
    if isinstance(store, MixedDocuments):
        return None
    lengths = np.asarray(store.lengths)
    if settings.long_documents == "truncate":
        lengths = np.minimum(lengths, settings.context_window)
    return -(-int(lengths.sum()) // (settings.micro_batches * settings.context_window))


def refuse_prediction() -> NoReturn:
    """Raise MisconfigurationException: there is no ``trainer.predict``."""
    raise MisconfigurationException(
        "trainer.predict is not there: a step's documents are split over ranks, and no rank has the"
        " logits of a whole document. For losses use WLBDataModule(test_documents=...) and"
        " trainer.test; to score or generate, take the model elsewhere: lightning-wlb export writes"
        " a Hugging Face folder, and LanguageModule.load_from_checkpoint reads a consolidated file."
    )
