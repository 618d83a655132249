"""Runs on two nodes of one machine, which :mod:`benchmarks.slow_link` makes.

Ranks are started as torchrun would start them on each node, by the variables that it sets; they are
forks of a server that has everything imported, which then move into their namespace.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import slow_link
from benchmarks.ranks import free_port
from benchmarks.slow_link import ADDRESSES, INTERFACE, Network
from tests.soak import forked
from tests.soak.processes import Ending, _context, _environment, _living, kill, session
from tests.soak.training import Run


@contextmanager
def network() -> Iterator[Network]:
    """Make two nodes; skips the test where that cannot be done."""
    if not slow_link.possible():
        pytest.skip("root")
    with slow_link.network() as made:
        yield made


def run_on_nodes(
    options: Run,
    network: Network,
    within: float,
    meanwhile: Callable[[], Any] = lambda: None,
) -> list[Ending]:
    """Run on two ranks of each node, and wait until all processes of all ranks have ended.

    Args:
        within: seconds after which what is left is killed.
        meanwhile: called every 50 ms. When it first returns something, seconds begin to count.

    Returns:
        How each rank ended.
    """
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    port, begin, counting = free_port(), time.monotonic(), False
    ranks = []
    for rank in range(4):
        node, local = divmod(rank, 2)
        given = {
            "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": port, "WORLD_SIZE": 4, "RANK": rank,
            "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": node,
            "TORCHELASTIC_RUN_ID": "soak", "GLOO_SOCKET_IFNAME": INTERFACE,
        }  # fmt: skip
        environment = _environment() | {name: str(value) for name, value in given.items()}
        arguments = options, environment, network.nodes[node]
        ranks.append(_context.Process(target=begin_on_node, args=arguments))
        ranks[-1].start()
    ended: dict[int, float] = {}
    try:
        while len(ended) < len(ranks) and time.monotonic() < begin + within:
            for rank, process in enumerate(ranks):
                if rank not in ended and process.exitcode is not None and not left(process.pid):
                    ended[rank] = time.monotonic()
            if meanwhile() and not counting:
                begin, counting = time.monotonic(), True
            time.sleep(0.05)
        now = time.monotonic()
        return [
            Ending(
                process.exitcode if rank in ended else None,
                ended.get(rank, now) - begin,
                left(process.pid),
            )
            for rank, process in enumerate(ranks)
        ]
    finally:
        for process in ranks:
            for pid in [*session(process.pid or 0)]:
                kill(pid)
            process.join(10)


def left(number: int | None) -> tuple[str, ...]:
    """What has not ended of a rank and its workers."""
    return tuple(_living(number or 0))


def begin_on_node(options: Run, environment: dict[str, str], namespace: str) -> None:
    """Move into a namespace, and be a rank there; does not return."""
    slow_link.enter(namespace)
    forked.begin(options, environment)
