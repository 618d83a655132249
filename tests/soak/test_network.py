"""Two nodes of two ranks, and a network between them that is slow, loses packets or is cut."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_wlb.checkpoints import manifest
from tests.soak import table
from tests.soak.network import Network, network, run_on_nodes
from tests.soak.processes import Ending, losses, run, states, tail
from tests.soak.test_faults import STEPS, unbroken
from tests.soak.training import Run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]
MESH = (2, 2, 1, 1)
TIMEOUT = 20.0
GRACE = 60.0
"""Seconds after the time-out until no process is left."""


@pytest.fixture
def wire() -> Iterator[Network]:
    with network() as made:
        yield made


def options(folder: Path, **more: object) -> Run:
    return Run(str(folder), MESH, STEPS, nodes=2, **more)  # type: ignore[arg-type]


def said(folder: Path) -> str:
    logs = sorted(folder.glob("rank-*.log"))
    return "\n\n".join(f"{log.name}:\n{tail(log)}" for log in logs)


def check_whole(folder: Path, endings: list[Ending]) -> None:
    """All ranks ended well, and every bit is that of a run on one node that nothing disturbed."""
    assert [each.code for each in endings] == [0] * 4, said(folder)
    want, ends = unbroken("pipeline")
    assert losses(folder) == want
    assert states(folder) == ends


class Cut:
    """Cuts the network for ``seconds``, once a step after the first checkpoint is done."""

    def __init__(
        self, wire: Network, folder: Path, senders: frozenset[int], seconds: float
    ) -> None:
        self.wire, self.folder, self.senders, self.seconds = wire, folder, senders, seconds
        self.since: float | None = None

    def __call__(self) -> bool:
        if self.since is None:
            path = self.folder / "losses"
            if not path.exists() or len(losses(self.folder)) < 4:
                return False
            self.since, self.wire.cut = time.monotonic(), self.senders
        elif time.monotonic() > self.since + self.seconds:
            self.wire.cut = frozenset()
        return True


def test_a_slow_network_that_loses_packets_changes_no_bit(wire: Network, tmp_path: Path) -> None:
    wire.delay, wire.loss = 0.1, 0.05
    begin = time.monotonic()
    check_whole(tmp_path, run_on_nodes(options(tmp_path), wire, 1200))
    table.write_figure(
        "two nodes, every packet 100 ms late and 5 % of them lost",
        f"{STEPS} steps in {time.monotonic() - begin:.0f} s, bit for bit the undisturbed run's",
    )


def test_a_cut_of_half_a_minute_is_outlasted(wire: Network, tmp_path: Path) -> None:
    """What is under way is sent again; the run says meanwhile which ranks it does not hear."""
    cut = Cut(wire, tmp_path, frozenset({0, 1}), 30.0)
    endings = run_on_nodes(options(tmp_path, timeout=100.0), wire, 200, cut)
    check_whole(tmp_path, endings)
    assert re.search(r"[Nn]o sign of life from rank", said(tmp_path)), said(tmp_path)
    table.write_figure(
        "two nodes, no packet passes for 30 s, time-out 100 s",
        "goes on, bit for bit the undisturbed run's",
    )


WAYS = {"both ways": {0, 1}, "from the first node": {0}, "from the second node": {1}}


@pytest.mark.parametrize("way", list(WAYS))
def test_a_cut_that_lasts_ends_the_run_on_both_sides(
    way: str, wire: Network, tmp_path: Path
) -> None:
    cut = Cut(wire, tmp_path, frozenset(WAYS[way]), 30 * TIMEOUT)
    endings = run_on_nodes(options(tmp_path, timeout=TIMEOUT), wire, TIMEOUT + GRACE, cut)
    for rank, ending in enumerate(endings):
        assert not ending.left, said(tmp_path)
        assert ending.code not in (0, None), said(tmp_path)
        end = tail(tmp_path / f"rank-{rank}.log", 3)
        assert re.search(r"(?i)timed out|does not answer|rank \d+ failed|closed", end), (rank, end)
    wire.cut = frozenset()
    (tmp_path / "losses").unlink()
    again = run_on_nodes(options(tmp_path, resume=True), wire, 200)
    assert [each.code for each in again] == [0] * 4, said(tmp_path)
    began = int((tmp_path / "began").read_text())
    assert began == 3, "the newest checkpoint"
    want, ends = unbroken("pipeline")
    assert losses(tmp_path) == {step: loss for step, loss in want.items() if step > began}
    assert states(tmp_path) == ends
    table.write_figure(
        f"two nodes, no packet passes any more {way}, time-out {TIMEOUT:g} s",
        f"ended on both sides after {max(each.seconds for each in endings):.0f} s; resumed bit for"
        " bit",
    )


def test_two_runs_that_save_into_one_folder_leave_whole_checkpoints(tmp_path: Path) -> None:
    """As where a job was started twice: what is there is one run's or the other's."""
    folders = [tmp_path / "one", tmp_path / "other"]
    (folders[0] / "checkpoints").mkdir(parents=True)
    folders[1].mkdir()
    (folders[1] / "checkpoints").symlink_to(folders[0] / "checkpoints")
    endings: dict[Path, Ending] = {}

    def train(folder: Path) -> None:
        endings[folder] = run(Run(str(folder), MESH, 30, name="last", save_every=1), 200)

    threads = [threading.Thread(target=train, args=[folder]) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = [endings[folder].code for folder in folders]
    assert all(not endings[folder].left for folder in folders)
    assert 0 in codes, said(folders[0]) + said(folders[1])
    found = list((folders[0] / "checkpoints").glob("*.ckpt"))
    assert found
    for path in found:
        manifest.check(path)
    table.write_figure(
        "two runs that save every step into one folder under one name",
        f"{'both end well' if codes == [0, 0] else 'one ends with an error'}; every checkpoint that"
        " is left is whole",
    )
