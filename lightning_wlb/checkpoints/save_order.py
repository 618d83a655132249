"""Which of several checkpoints was saved last, without trusting a clock.

A manifest names the run that saved the folder, the number of the save in that run, and the runs
known to that run: those of checkpoints that it loaded or found beside its first save, and those
known to these. So a checkpoint is newer than its run's earlier checkpoints, and than all
checkpoints of runs known to its run. A run is a process. If it goes back to an earlier step it
keeps its name, and its later saves are newer. Clocks decide between runs that do not know each
other, for example because a folder was copied in, or there are two launchers (the order of ``git
log --date-order``). A checkpoint of a version that did not name the run is a run of its own.

Cost: the first save reads a small file per checkpoint. Sorting n of them by r runs: O(n r + r²).
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_wlb.checkpoints import manifest
from lightning_wlb.checkpoints.atomic_folders import strangers
from lightning_wlb.checkpoints.manifest import Manifest, Saver

_MOST_KNOWN = 10_000
"""Most runs that a manifest names, the latest: a stranger's millions would make it unreadable."""


@dataclass(eq=False)
class SavingRun:
    """A run that saves checkpoints, as its manifests name it; on rank 0."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    count: int = 0
    known: dict[str, None] = field(default_factory=dict)  # other runs, in the order of their ends
    _folders: set[Path] = field(default_factory=set)

    def next_save(self, folder: Path) -> Saver:
        """The entry about this run in the manifest of its next checkpoint in a folder."""
        if folder not in self._folders:
            self._folders.add(folder)
            names = (each / manifest.NAME for each in sorted(folder.iterdir()))
            there = [name.parent for name in names if os.path.isfile(name)]
            strange = {*strangers(there, folder)}
            for path in there:
                if path not in strange:
                    self.knows(path)
        self.count += 1
        return Saver(self.name, self.count, tuple(self.known)[-_MOST_KNOWN:])

    def knows(self, path: Path) -> None:
        """Note the run that saved a checkpoint, and the runs known to it, if it can be read."""
        self.known.update(dict.fromkeys(each for each in runs_of(path) if len(each) < 100))
        self.known.pop(self.name, None)


def runs_of(path: Path) -> tuple[str, ...]:
    """The runs known to a checkpoint's run, and that run; none if it cannot be read."""
    try:
        saved = manifest.read(path)
    except (OSError, ValueError):  # it is no checkpoint, or damaged
        return ()
    return *saved.by.known, _run(saved)


def newest_first(saved: Mapping[Path, Manifest]) -> list[Path]:
    """Sort checkpoints, the one that was saved last first.

    If manifests contradict each other (somebody has edited them), the order is not specified.
    """
    runs: dict[str, list[Path]] = {}
    known: dict[str, set[str]] = {}
    for path in sorted(saved, key=lambda path: (saved[path].by.number, _time(path, saved))):
        run = _run(saved[path])
        runs.setdefault(run, []).append(path)
        known.setdefault(run, set()).update(saved[path].by.known)
    known_by = Counter(each for run in runs for each in known[run] - {run})
    ordered = []
    while runs:
        latest = [run for run in runs if not known_by[run]] or list(runs)
        run = max(latest, key=lambda run: _time(runs[run][-1], saved))
        ordered.append(runs[run].pop())
        if not runs[run]:
            del runs[run]
            known_by.subtract(known[run] - {run})
    return ordered


def _run(saved: Manifest) -> str:
    return saved.by.run or saved.save


def _time(path: Path, saved: Mapping[Path, Manifest]) -> tuple[float, int, str]:
    return saved[path].time, saved[path].step, str(path)
