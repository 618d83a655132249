"""Two nodes on one machine, and the network between them, which can be slow, lossy or cut.

A node is a network namespace. In each lies a TUN device, an interface whose packets a process reads
and writes, and a thread of this process carries packets from one to the other: it waits before it
hands a packet on (``delay``), drops some by chance (``loss``), or all in a direction (``cut``). So
this needs neither ``tc netem`` nor ``iptables``, which many kernels lack, but root and
``/dev/net/tun``.

Ranks are started as torchrun would start them on each node, by the variables that it sets; they are
forks of a server that has everything imported, which then move into their namespace.
"""

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ranks import free_port
from tests.soak import forked
from tests.soak.processes import Ending, _context, _environment, _living, kill, session
from tests.soak.training import Run

ADDRESSES = ("10.213.7.1", "10.213.7.2")
NEWNET = 0x40000000
TUNSETIFF, TUN, WITHOUT_HEADER = 0x400454CA, 0x0001, 0x1000


@dataclass(eq=False)
class Network:
    """What lies between two nodes.

    Attributes:
        nodes: the names of their namespaces.
        delay: seconds that a packet takes.
        loss: part of the packets that is dropped.
        cut: the nodes whose packets do not arrive at the other.
        carried: packets that have arrived.
    """

    nodes: tuple[str, str]
    ends: tuple[int, int]
    delay: float = 0.0
    loss: float = 0.0
    cut: frozenset[int] = frozenset()
    carried: int = 0
    over: bool = False
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def carry(self) -> None:
        """Carry packets until it is over."""
        under_way: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while not self.over:
            due = under_way[0][0] - time.monotonic() if under_way else 0.2
            ready, _, _ = select.select(self.ends, [], [], min(max(due, 0.0), 0.2))
            now = time.monotonic()
            for end in ready:
                sender, packet = self.ends.index(end), os.read(end, 1 << 16)
                if sender not in self.cut and self.chance.random() >= self.loss:
                    heapq.heappush(under_way, (now + self.delay, next(numbers), 1 - sender, packet))
            while under_way and under_way[0][0] <= now:
                _, _, receiver, packet = heapq.heappop(under_way)
                os.write(self.ends[receiver], packet)
                self.carried += 1


@contextmanager
def network() -> Iterator[Network]:
    """Make two nodes; skips the test where that cannot be done."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists() or shutil.which("ip") is None:
        pytest.skip("root")
    names = tuple(f"soak-{os.getpid()}-{side}" for side in "ab")
    ends: list[int] = []
    try:
        for side, name in enumerate(names):
            # An interface's name has at most 15 characters.
            device = f"soak{os.getpid() % 10**6}{'ab'[side]}"
            ends.append(os.open("/dev/net/tun", os.O_RDWR))
            flags = struct.pack("16sH22x", device.encode(), TUN | WITHOUT_HEADER)
            fcntl.ioctl(ends[side], TUNSETIFF, flags)
            _ip("netns", "add", name)
            _ip("link", "set", device, "netns", name, "name", "wire")
            peer = ("peer", ADDRESSES[1 - side])
            _ip("-n", name, "address", "add", ADDRESSES[side], *peer, "dev", "wire")
            for each in ("lo", "wire"):
                _ip("-n", name, "link", "set", each, "up")
        made = Network(names, (ends[0], ends[1]))
        carrier = threading.Thread(target=made.carry, daemon=True)
        carrier.start()
        yield made
        made.over = True
        carrier.join()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        for end in ends:
            os.close(end)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


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
            "TORCHELASTIC_RUN_ID": "soak", "GLOO_SOCKET_IFNAME": "wire",
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
    with open(f"/run/netns/{namespace}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    forked.begin(options, environment)
