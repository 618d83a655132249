"""Which exceptions ranks have together. Of real runs: test_failures.py and test_watchdog.py."""

import ctypes
import os
import signal
import sys
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_wlb.data.loader import StepLoader
from lightning_wlb.data.loader_workers import die_with
from lightning_wlb.schedule.actions import FORWARD, Action
from lightning_wlb.supervision import faults
from lightning_wlb.supervision.progress import AFTER, CALLBACKS, OPTIMISING, PROGRESS, RUNNING
from lightning_wlb.supervision.signals import INTERRUPT, STOP
from tests.strategy import harness


class Asked:
    """In place of the other ranks: they are all where this one is."""

    def __init__(self, verdict: tuple[bool, str] = (False, "one is elsewhere")) -> None:
        self.verdict = verdict
        self.places: list[str] = []
        self.texts: list[str] = []

    def agree(self, place: str, text: str, agreed: bool) -> tuple[bool, str]:
        self.places.append(place)
        self.texts.append(text)
        return self.verdict

    def stop(self) -> None:
        pass


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(faults.atexit, "register", lambda _: None)
    yield SimpleNamespace(
        global_step=3,
        _active_loop=None,
        state=SimpleNamespace(stage="train"),
        checkpoint_callbacks=[ModelCheckpoint(save_on_exception=True)],
    )
    PROGRESS.begin()


def of_two() -> faults.Faults:
    each = faults.Faults()
    each._size = 2
    return each


def place(runner, rank: int, error: BaseException, part: int, doing: str | Action) -> str:
    each = of_two()
    each._rank, each._watchdog = rank, Asked()
    PROGRESS.note(part, doing)
    each.on_exception(runner, None, error)
    (callback,) = runner.checkpoint_callbacks
    assert not callback.save_on_exception, "what it would say is not true"
    (asked,) = each._watchdog.places
    each.end()
    assert callback.save_on_exception, "as the user has made it"
    return asked


def test_ranks_are_together_where_they_do_the_same(runner):
    same = [place(runner, rank, KeyboardInterrupt(), AFTER, "what follows") for rank in (0, 1)]
    assert same[0] == same[1]
    same = [place(runner, rank, ValueError(), RUNNING, Action(0, FORWARD, 1)) for rank in (0, 1)]
    assert same[0] == same[1]


def test_what_all_ranks_raise_is_not_said_by_each(runner, capsys):
    for together, said in ((True, ""), (False, "[rank 1] WLBStrategy: failed, ")):
        each, error = of_two(), ValueError("no such word")
        each._rank, each._watchdog = 1, Asked((together, "one is elsewhere"))
        each.on_exception(runner, None, error)
        assert capsys.readouterr().err.startswith(said)
        assert bool(said) == (each.alone is not None)
        (note,) = error.__notes__
        assert note.startswith("WLBStrategy: " + ("one is" if said else "all ranks failed so"))
        each.end()


def test_ranks_in_one_step_are_not_together_where_one_is_further(runner):
    """As after a second Ctrl-C, which is obeyed wherever a rank is."""
    places = {
        place(runner, 0, KeyboardInterrupt(), part, doing)
        for part, doing in [
            (RUNNING, "its beginning"),
            (RUNNING, Action(0, FORWARD, 0)),
            (RUNNING, Action(0, FORWARD, 1)),
            (CALLBACKS, "its callbacks"),
            (AFTER, "what follows"),
        ]
    }
    assert len(places) == 5


def test_others_are_told_the_ends_of_a_long_error(runner):
    each = of_two()
    each._watchdog = Asked()
    PROGRESS.note(AFTER, "what follows")
    traceback = "\n".join(f"  File {number}" for number in range(50))
    each.on_exception(runner, None, RuntimeError(f"Caught KeyError.\n{traceback}\nKeyError: 3\n"))
    each.on_exception(runner, None, ValueError("x" * 100_000))
    short, long = (text.partition("what follows: ")[2] for text in each._watchdog.texts)
    assert short == "RuntimeError: Caught KeyError. ... KeyError: 3"
    assert long.startswith("ValueError: xxx")
    assert len(long) <= faults.TOLD


def test_a_loader_that_cannot_begin_says_why_last(monkeypatch):
    def fails(_: StepLoader) -> None:
        raise ValueError("this document")

    monkeypatch.setattr(StepLoader, "__iter__", fails)
    with pytest.raises(ValueError, match="this document"):
        harness.trainer("auto", 1, callbacks=[faults.Faults()]).fit(
            harness.module(harness.SMALL), harness.data(harness.SMALL)
        )


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_others_are_told_of_an_error_without_a_text(runner):
    each = of_two()
    each._watchdog = Asked()
    PROGRESS.note(AFTER, "what follows")
    each.on_exception(runner, None, Unspeakable())
    (told,) = each._watchdog.texts
    assert told.endswith("Unspeakable: its text cannot be made (RuntimeError)")


def test_ranks_in_the_step_of_their_optimizers_are_never_together(runner):
    places = [place(runner, rank, MemoryError(), OPTIMISING, "its optimiser") for rank in (0, 1)]
    assert places[0] != places[1]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl")
def test_a_rank_that_ends_slowly_is_not_killed_with_its_launcher():
    def dies_by() -> int:
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
        return number.value

    die_with(os.getppid())
    assert dies_by() == signal.SIGKILL
    faults.Faults().on_train_end(None, None)
    assert dies_by() == 0


@pytest.mark.parametrize(
    ("error", "part", "noted", "together"),
    [
        (SIGTERMException(), AFTER, 0, True),
        (SIGTERMException(), AFTER, STOP, False),  # that of a rank whose loader is stuck
        (KeyboardInterrupt(), RUNNING, INTERRUPT, False),  # the second one
        (ValueError(), AFTER, 0, False),
    ],
)
def test_without_a_watch_ranks_are_together_in_what_they_have_agreed_on(
    runner, monkeypatch, error, part, noted, together
):
    monkeypatch.setattr(faults.NOTICES, "mine", noted)
    each = of_two()
    PROGRESS.note(part, "whatever")
    each.on_exception(runner, None, error)
    assert (each.alone is None) == together
