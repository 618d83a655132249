"""One Slurm for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing, running
from tests.slurm.jobs import Run


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with running() as made:
        yield made


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Run:
    """The run as it is without Slurm, which every other must equal bit for bit."""
    run = Run(tmp_path_factory.mktemp("unbroken"))
    run.without_slurm(cluster.outside)
    return run
