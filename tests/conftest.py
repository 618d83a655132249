"""No time limit on an example, and the order of the tests for ``make test``.

A busy machine would fail hypothesis' limit on a single example; pytest has one on every test.

A run in the process of the tests leaves its rank and the address of its process group in the
environment. They are taken out again after each test, or the processes that a later one starts
would take them for theirs.

``--device`` and ``--attention-backend`` are :mod:`tests.device`'s.

Tests of a module that starts further processes (ranks, commands) get the marker ``processes``,
which ``make test-fast`` leaves out.

For the order: a worker takes a file at a time.
Files of runs on several ranks come first: they take most of the suite's time, and one that begins
last leaves the other worker idle. (A file is not split among workers: what a module's fixture has
run on several ranks would run in both.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# xdist starts its workers by python -c, in which WLBStrategy starts no further ranks.
if sys.argv[0] == "-c":
    sys.argv[0] = "pytest"

# By the CPU time that they take, most first.
LONG = (
    "strategy/test_gradients.py",
    "checkpoints/test_resuming_on_meshes.py",
    "strategy/test_wlb.py",
    "test_examples.py",
    "models/huggingface",
    "test_recipes.py",
    "launchers",
    "test_readme.py",
    "test_lazy_import.py",
    "strategy",
    "training",
    "heterogeneous",
    "supervision",
    "cli",
    "attention",
)

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def _no_address_is_left() -> Iterator[None]:
    """A strategy that ran in this process leaves its address to the processes of later tests."""
    before = os.environ.get("MASTER_PORT")
    yield
    assert os.environ.get("MASTER_PORT") == before, "run it by tests.ranks.run_ranks"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), help="where gradients are tested")
    parser.addoption("--attention-backend", metavar="NAME", help="in the place of every other one")


def pytest_configure(config: pytest.Config) -> None:
    """Before a test module is imported, and inherited by the ranks that tests start."""
    for option, variable in (
        ("--device", "TESTS_DEVICE"),
        ("--attention-backend", "TESTS_ATTENTION_BACKEND"),
    ):
        if (value := config.getoption(option)) is not None:
            os.environ[variable] = value


# What a test module that starts further processes has imported, by name.
STARTERS = ("run_ranks", "harness", "multiprocessing", "subprocess")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place(Path(__file__).parent))
    for item in items:
        module = getattr(item, "module", None)
        if any(hasattr(module, name) for name in STARTERS):
            item.add_marker("processes")


def _place(tests: Path) -> Callable[[pytest.Item], int]:
    """Where in the order of ``LONG`` an item's file stands; sorting keeps the rest as it is."""

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(tests).as_posix()
        found = [at for at, name in enumerate(LONG) if path == name or path.startswith(f"{name}/")]
        return found[0] if found else len(LONG)

    return place


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A sticky folder in which another user has made ``theirs``, and a link ``leads`` to a home."""
    if os.geteuid() != 0:
        pytest.skip("only root gives files to another user")
    scratch = tmp_path / "scratch"
    for each in ("scratch/theirs/in", "home/in"):
        (tmp_path / each).mkdir(parents=True)
    scratch.chmod(0o1777)
    (scratch / "leads").symlink_to(tmp_path / "home")
    for each in ("theirs", "leads"):
        os.lchown(scratch / each, 65534, 65534)
    return scratch
