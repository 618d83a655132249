"""The faults that the soak plants in runs of four ranks, and what is promised of each.

Every fault acts in step 4 of 7 unless it says otherwise (steps are counted from 0); checkpoints are
saved after steps 3 and 6, validation runs after every second step. Rank 3 is the one that fails, or
rank 0, which is also the launcher.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGINT, SIGKILL, SIGSEGV, SIGSTOP, SIGTERM, Signals
from typing import Any, Literal

import numpy as np

from lightning_wlb.checkpoints import atomic_folders
from tests.soak import plants

ALL = (0, 1, 2, 3)
LAUNCHER: dict[str, Any] = {"ranks": (0,), "ends": "dies", "says": ""}
"""All ranks are killed with their launcher, before they can say so."""
STUCK: dict[str, Any] = {"timeout": 15.0, "says": r"(?i)timed out|time-?out|rank 3"}
APART: dict[str, Any] = {"interpreters": True}
KILL = plants.sends(SIGKILL)
DIED = r"(?i)connection (closed|reset)|terminated with code|broken pipe|rank [03]"
"""What survivors may say of a rank that died without a word."""


@dataclass(frozen=True)
class Fault:
    """A fault, where it acts, and how the run is promised to end.

    Attributes:
        name: the row's name in the table.
        place: where the fault acts (:mod:`.plants`).
        does: what it does there.
        ends: how the run ends: ``"error"``: with an exit code that is not 0; ``"stops"``: all ranks
            with code 0; ``"goes on"`` to the last step; ``"dies"``: with any code, since the
            launcher dies.
        says: regular expression that is found in one of the last lines of the rank that failed, or
            of a survivor if that rank died without a word.
        ranks: the ranks on which the fault acts.
        step: steps taken when it acts, at the earliest.
        saves: ``"asked"``: saves with ``save_on_exception`` only; ``"never"``: the last checkpoint
            stands; ``"either"``: depends on what a signal meets.
        within: seconds after which no process is left.
        timeout: seconds that the strategy's collectives wait; None: its default.
        silent: the ranks on which it acts can say nothing more.
        interpreters: every rank has an interpreter, as ``python script.py`` starts them.
        mounted: the checkpoints lie on a small file system of their own.
    """

    name: str
    place: str
    does: Callable[[Any], Any]
    ends: Literal["error", "stops", "goes on", "dies"] = "error"
    says: str = r"planted on rank"
    ranks: tuple[int, ...] = (3,)
    step: int = 4
    saves: Literal["asked", "never", "either"] = "never"
    within: float = 60.0
    timeout: float | None = None
    silent: bool = False
    interpreters: bool = False
    mounted: bool = False

    @property
    def key(self) -> str:
        """The name, as it stands in a test's name."""
        return re.sub(r"\W+", "_", self.name)


def _died(name: str, place: str, does: Callable[[Any], Any], **options: Any) -> Fault:
    """A rank that ends without a word."""
    return Fault(name, place, does, **({"says": DIED, "silent": True} | options))


def _signal(name: str, place: str, number: Signals, **options: Any) -> Fault:
    """A signal to all processes of a run, which ends it on all ranks together."""
    options = {"does": plants.sends_all(number), "ends": "stops", "says": ""} | options
    return Fault(name, place, **({"saves": "asked"} | options))


RAISED = (
    Fault("a step raises on rank 3", "step", plants.raises),
    Fault("a step raises on rank 0", "step", plants.raises, ranks=(0,)),
    Fault("a step raises on all ranks", "step", plants.raises, ranks=ALL, saves="asked"),
    Fault("forward raises on rank 3", "forward", plants.raises),
    Fault("backward raises on rank 3", "backward", plants.raises),
    Fault("an optimizer raises on rank 3", "optimizer", plants.raises),
    Fault("a callback raises on rank 3", "batch end", plants.raises),
    Fault("a callback raises on all ranks", "batch end", plants.raises, ranks=ALL, saves="asked"),
    Fault("validation raises on rank 3", "validation", plants.raises),
    Fault("validation raises on all ranks", "validation", plants.raises, ranks=ALL, saves="asked"),
    Fault("set-up raises on rank 3", "setup", plants.raises, step=0),
    Fault("set-up raises on all ranks", "setup", plants.raises, step=0, ranks=ALL),
    Fault("prepare_data raises on rank 0", "prepare_data", plants.raises, step=0, ranks=(0,)),
    Fault("train_dataloader raises on rank 3", "train_dataloader", plants.raises, step=0),
    Fault("a read raises in a worker of rank 3", "read", plants.raises),
    Fault("a read raises in every worker", "read", plants.raises, ranks=ALL, saves="either"),
    Fault("a hook of saving raises on rank 3", "saving", plants.raises, step=6),
    Fault("a hook of saving raises on rank 0", "saving", plants.raises, step=6, ranks=(0,)),
    # All ranks fail together, and their last save succeeds.
    Fault("writing a shard raises on rank 3", "writing", plants.raises, step=6, saves="asked"),
    Fault(
        "a stale file handle on rank 3", "writing", plants.finds_stale_handle, step=6, saves="asked"
    ),
    Fault("sys.exit on rank 3", "step", plants.leaves),
    Fault("out of memory on rank 3", "forward", plants.runs_out_of_memory),
)

GOES_ON: dict[str, Any] = {"ends": "goes on", "says": "", "saves": "either"}
DISTURBED = (
    Fault(
        "the clock of rank 0 goes back an hour",
        "step",
        plants.turns_clock(-3600),
        ranks=(0,),
        **GOES_ON,
    ),
    Fault("the clock of rank 3 goes on a day", "step", plants.turns_clock(86400), **GOES_ON),
    Fault("rank 3 stands still for 8 seconds", "step", plants.stalls(8), **GOES_ON),
)

START_UP: dict[str, Any] = {"place": "start-up", "step": 0}
LOCKED: dict[str, Any] = {"ranks": (0,), "ends": "dies"}
WORKER: dict[str, Any] = {"says": r"(?i)worker", "silent": False}
NETWORK: dict[str, Any] = {"says": r"(?i)connection|broken pipe|socket", "silent": False}
KILLS_ITS_RANK = plants.hangs_after(plants.kills_rank)
DIED_SILENTLY = (
    _died("exit with code 1 on rank 3", "step", plants.exits(1)),
    _died("exit with code 0 on rank 3", "optimizer", plants.exits(0)),
    _died("kill -9 of rank 3 in a step", "forward", KILL),
    _died("kill -9 of the launcher in a step", "forward", KILL, **LAUNCHER),
    _died("kill -9 of rank 3 while validating", "validation", KILL),
    _died("kill -9 of rank 3 while saving", "writing", KILL, step=6),
    _died("kill -9 of the launcher while saving", "writing", KILL, step=6, **LAUNCHER),
    _died("kill -9 of rank 3 in start-up", does=KILL, says="", **START_UP),
    _died("kill -9 of the launcher in start-up", does=KILL, **START_UP, **LAUNCHER, **APART),
    _died("a segmentation fault on rank 3", "backward", plants.sends(SIGSEGV)),
    _died("kill -9 of a loader worker of rank 3", "step", plants.sends_workers(SIGKILL), **WORKER),
    _died("kill -9 of rank 3, its worker in a read without end", "read", KILLS_ITS_RANK),
    _died("a read without end in a worker of rank 3", "read", plants.hangs, **STUCK),
    _died("rank 3 is stopped (SIGSTOP)", "step", plants.sends(SIGSTOP), **STUCK),
    _died("rank 3 sleeps for ever", "batch end", plants.hangs, **STUCK),
    _died("rank 3 holds Python's lock for ever", "step", plants.holds_lock, **STUCK),
    _died("rank 0 holds Python's lock for ever", "step", plants.holds_lock, **STUCK, **LOCKED),
    _died("rank 3 loses its connections", "step", plants.cuts_connections, **NETWORK),
)

TERMINATES, INTERRUPTS = plants.sends(SIGTERM), plants.sends(SIGINT)
EITHER: dict[str, Any] = {"saves": "either"}
# A rank that has no batch in hand ends without the others' consent.
IN_READ = {"does": plants.hangs_after(plants.sends_all(SIGTERM), 2.0), "ends": "dies"} | EITHER
CTRL_C: dict[str, Any] = {"ends": "error", "ranks": (0,)}
EARLY = START_UP | EITHER
SIGNALS = (
    _signal("SIGTERM to rank 3", "step", SIGTERM, does=TERMINATES),
    _signal("SIGTERM to rank 0", "step", SIGTERM, does=TERMINATES, ranks=(0,)),
    _signal("SIGTERM to all processes", "forward", SIGTERM),
    _signal("SIGTERM to all processes while validating", "validation", SIGTERM),
    _signal("SIGTERM to all processes while saving", "writing", SIGTERM, step=6, **EITHER),
    _signal("SIGTERM to all processes, a worker in a read without end", "read", SIGTERM, **IN_READ),
    _signal("SIGTERM to all processes in start-up", number=SIGTERM, **EARLY, **LAUNCHER),
    _signal(
        "SIGTERM to the launcher in start-up",
        number=SIGTERM,
        does=TERMINATES,
        **EARLY,
        **LAUNCHER,
        **APART,
    ),
    _signal("SIGTERM to rank 3 in start-up", number=SIGTERM, does=TERMINATES, ends="dies", **EARLY),
    _signal("Ctrl-C", "forward", SIGINT, **CTRL_C),
    _signal("Ctrl-C while validating", "validation", SIGINT, **CTRL_C),
    _signal("Ctrl-C in start-up", number=SIGINT, **EARLY, **LAUNCHER),
    _signal("SIGINT to rank 3 alone", "step", SIGINT, does=INTERRUPTS, ends="error"),
)

NOT_A_NUMBER: dict[str, Any] = {"says": r"(?i)finite|nan"}
INFINITE: dict[str, Any] = {"says": r"(?i)finite|inf", "saves": "asked"}
NUMBERS = (
    Fault("not a number in a weight of rank 3", "step", plants.fills_weights, **NOT_A_NUMBER),
    Fault("an infinite gradient on rank 3", "after backward", plants.fills_gradients, **INFINITE),
    Fault(
        "a store returns too few tokens on rank 3",
        "tokens",
        lambda tokens: tokens[:-1],
        says=r"document \d+",
    ),
    Fault(
        "other documents on rank 3",
        "tokens",
        lambda tokens: (tokens + 1) % 64,
        step=0,
        says=r"(?i)rank",
    ),
)

DISK: dict[str, Any] = {"place": "saving", "step": 6, "ranks": (0,), "mounted": True}
GONE: dict[str, Any] = {"ranks": (0,), "ends": "goes on", "says": ""} | EITHER
STATE: dict[str, Any] = {"place": "state", "step": 6, "ranks": ALL}
SAVING = (
    Fault("the disk is full", does=plants.fills_disk, says=r"(?i)no space|full", **DISK),
    Fault(
        "the checkpoints' folder is read-only",
        does=plants.forbids_writing,
        says=r"(?i)read-only|denied",
        **DISK,
    ),
    Fault("the checkpoints' folder disappears", "batch end", plants.removes_checkpoints, **GONE),
    Fault(
        "state that cannot be pickled on all ranks",
        does=lambda plant: lambda: None,
        says=r"(?i)pickl|callback",
        **STATE,
    ),
    Fault(
        "state that could not be read again on all ranks",
        does=lambda plant: np.float64(1),
        says=r"(?i)numpy|weights_only",
        **STATE,
    ),
)

CRASHES = tuple(
    _died(f"kill -9 of the launcher in a save: {each}", f"save: {each}", KILL, step=6, **LAUNCHER)
    for each in atomic_folders.POINTS
)

FAULTS = {
    each.key: each
    for group in (RAISED, DIED_SILENTLY, SIGNALS, NUMBERS, SAVING, DISTURBED)
    for each in group
}
"""By key; the rows of the table."""

PLANTED = FAULTS | {each.key: each for each in CRASHES}
"""By key; all that a run can be asked for."""
