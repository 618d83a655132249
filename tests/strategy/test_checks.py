"""What is refused before anything is launched."""

from __future__ import annotations

import sys

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_wlb.strategy import checks
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.strategy.harness import trainer


@pytest.mark.parametrize("name", ["-c", "-", ""])
def test_a_program_without_a_file_runs_on_one_device_only(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(MisconfigurationException, match=r"2 devices.*python -c.*devices=1 here"):
        trainer(WLBStrategy(), 2)
    assert trainer(WLBStrategy(), 1).strategy.launcher.is_interactive_compatible


def test_an_interactive_session_runs_on_one_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match="notebook") as info:
        trainer(WLBStrategy(), 3)
    assert "ddp" not in str(info.value)
    assert trainer(WLBStrategy(), 1).strategy.launcher.is_interactive_compatible


def test_a_script_is_run_again() -> None:
    assert trainer(WLBStrategy(), 2).strategy.launcher.num_processes == 2


@pytest.mark.parametrize(
    ("saves", "refused"),
    [
        (ModelCheckpoint(filename="{epoch}-{val/loss:.3f}"), True),
        (ModelCheckpoint(filename="{epoch}-{val/loss:.3f}", auto_insert_metric_name=False), False),
        (ModelCheckpoint(filename="best/{epoch}", auto_insert_metric_name=False), True),
        (ModelCheckpoint(), False),
        (OnExceptionCheckpoint(".", "failed/one"), True),
        (OnExceptionCheckpoint("."), False),
    ],
)
def test_no_checkpoint_is_saved_where_no_run_looks(saves, refused) -> None:
    """Lightning makes a folder of what stands before a slash."""
    run = trainer(WLBStrategy(), 1, callbacks=[saves], enable_checkpointing=True)
    if refused:
        with pytest.raises(MisconfigurationException, match=r"would save into subfolders, where"):
            checks.check_trainer(run)
    else:
        checks.check_trainer(run)
