"""Kill -9 at every named point of a save that replaces the only checkpoint: nothing is lost."""

from pathlib import Path

import pytest

from lightning_wlb.checkpoints import atomic_folders
from tests.soak.faults import CRASHES
from tests.soak.processes import losses, run, states, tail
from tests.soak.training import Run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]
MESH = (2, 2, 1, 1)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], list[str]]:
    home = tmp_path_factory.mktemp("unbroken")
    assert run(Run(str(home), MESH), 120).code == 0
    return losses(home), states(home)


@pytest.mark.parametrize("background", [False, True], ids=["in_step", "in_background"])
@pytest.mark.parametrize("crash", CRASHES, ids=[crash.key for crash in CRASHES])
def test_a_kill(crash, background, unbroken, tmp_path: Path) -> None:
    strategy = {"async_save": background}
    options = Run(str(tmp_path), MESH, fault=crash.key, name="last", strategy=strategy)
    ending = run(options, 60)
    said = tail(tmp_path / "rank-0.log")
    assert (tmp_path / "fired-0").exists(), said
    assert not ending.left, ending.left
    again = run(Run(str(tmp_path), MESH, name="last", resume=True, strategy=strategy), 60)
    assert again.code == 0, tail(tmp_path / "rank-0.log")
    began = int((tmp_path / "began").read_text())
    point = crash.place.removeprefix("save: ")
    late = atomic_folders.POINTS.index(point) >= atomic_folders.POINTS.index("named")
    assert began == (6 if late else 3)
    want, ends = unbroken
    assert losses(tmp_path) == want
    assert states(tmp_path) == ends
