"""Two nodes on one machine, and the network between them, which can be slow, lossy or cut.

A node is a network namespace. In each lies a TUN device, an interface whose packets a process reads
and writes, and a thread of this process carries packets from one to the other: it hands a packet on
when the ones before it have passed (``rate``) and it has travelled (``delay``), drops some by
chance (``loss``), or all in a direction (``cut``). So this needs neither ``tc netem`` nor
``iptables``, which many kernels lack, but root and ``/dev/net/tun``.
"""

from __future__ import annotations

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ADDRESSES = ("10.213.7.1", "10.213.7.2")
INTERFACE = "wire"
NEWNET = 0x40000000
TUNSETIFF, TUN, WITHOUT_HEADER = 0x400454CA, 0x0001, 0x1000


@dataclass(eq=False)
class Network:
    """What lies between two nodes.

    Attributes:
        nodes: the names of their namespaces.
        delay: seconds that a packet takes.
        rate: bytes per second in each direction; None: as fast as the thread carries them.
        loss: part of the packets that is dropped.
        cut: the nodes whose packets do not arrive at the other.
        carried: packets that have arrived.
        thread: the number by which the kernel knows the thread that carries them.
    """

    nodes: tuple[str, str]
    ends: tuple[int, int]
    delay: float = 0.0
    rate: float | None = None
    loss: float = 0.0
    cut: frozenset[int] = frozenset()
    carried: int = 0
    over: bool = False
    thread: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def carry(self) -> None:
        """Carry packets until it is over."""
        under_way: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        free = [0.0, 0.0]  # when each direction has sent what was given to it
        while not self.over:
            due = under_way[0][0] - time.monotonic() if under_way else 0.2
            ready, _, _ = select.select(self.ends, [], [], min(max(due, 0.0), 0.2))
            now = time.monotonic()
            for end in ready:
                sender, packet = self.ends.index(end), os.read(end, 1 << 16)
                if sender not in self.cut and self.chance.random() >= self.loss:
                    sent = len(packet) / self.rate if self.rate else 0.0
                    free[sender] = max(free[sender], now) + sent
                    arrives = free[sender] + self.delay
                    heapq.heappush(under_way, (arrives, next(numbers), 1 - sender, packet))
            while under_way and under_way[0][0] <= now:
                _, _, receiver, packet = heapq.heappop(under_way)
                os.write(self.ends[receiver], packet)
                self.carried += 1


def possible() -> bool:
    """Whether this process may make such nodes."""
    return os.geteuid() == 0 and Path("/dev/net/tun").exists() and shutil.which("ip") is not None


@contextmanager
def network(mtu: int = 1500) -> Iterator[Network]:
    """Make two nodes, whose packets have at most ``mtu`` bytes."""
    names = tuple(f"nodes-{os.getpid()}-{side}" for side in "ab")
    ends: list[int] = []
    try:
        for side, name in enumerate(names):
            # An interface's name has at most 15 characters.
            device = f"node{os.getpid() % 10**6}{'ab'[side]}"
            ends.append(os.open("/dev/net/tun", os.O_RDWR))
            flags = struct.pack("16sH22x", device.encode(), TUN | WITHOUT_HEADER)
            fcntl.ioctl(ends[side], TUNSETIFF, flags)
            _ip("netns", "add", name)
            _ip("link", "set", device, "netns", name, "name", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "mtu", str(mtu))
            peer = ("peer", ADDRESSES[1 - side])
            _ip("-n", name, "address", "add", ADDRESSES[side], *peer, "dev", INTERFACE)
            for each in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", each, "up")
        made = Network((names[0], names[1]), (ends[0], ends[1]))
        carrier = threading.Thread(target=made.carry, daemon=True)
        carrier.start()
        made.thread = carrier.native_id or 0
        yield made
        made.over = True
        carrier.join()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        for end in ends:
            os.close(end)


def enter(namespace: str) -> None:
    """Move this process, which has no other thread yet, into a namespace.

    Raises:
        OSError: it cannot be entered.
    """
    with open(f"/run/netns/{namespace}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
