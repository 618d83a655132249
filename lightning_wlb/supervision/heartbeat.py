"""Heartbeats: each rank tells rank 0 where it stands, and learns whether the ranks can go on.

A process group cannot carry this: a rank that has failed does not enter the collective in which the
others wait. So rank 0 listens on a port of its own, and every rank keeps a connection to it.
Messages are lines of JSON. A rank writes where it stands every few seconds, when its main thread
has an exception, and when its run is over. The kernel closes the connections of a process however
it ends, so rank 0 notices a killed rank within milliseconds, under any backend.

Rank 0 tells all ranks

* ``together`` once every rank has an exception at the same place: they can still save together;
* ``alone``, with the cause, once that is impossible: a rank died, ranks failed at different places,
  or not all failed within ``PATIENCE`` (``AGREED_PATIENCE``) seconds. None may wait for another;
* ``ended`` when its own run is over, after which nothing is watched any more.

When no rank makes progress for a while, rank 0 names the rank that is furthest behind, and asks for
its stack. Among ranks that are equally far, as before the first step, it names one that does not
wait for the others. Beside the error of the first rank that failed, the cause names silent ranks
and ranks that did not wait for others: that error may be a time-out for which they are to blame.

torch's TCPStore is not used: a request to a store whose process is stopped waits for ever.

Cost: some hundred bytes from each rank every ``heartbeat_seconds``; rank 0 reads at most 100
messages a second, each in some 10 µs, and has an open file for each rank. Once all ranks are
connected, other connections are closed and no more are accepted.
"""

from __future__ import annotations

import hmac
import json
import math
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lightning_wlb.distributed.collective_errors import names_of_ranks
from lightning_wlb.supervision.progress import RUNNING

PATIENCE = 5.0
"""Seconds within which all ranks must fail at the same place, to save there together."""

AGREED_PATIENCE = 20.0
"""The same if the ranks have agreed to end, where one rank's callback may take a while."""


def heartbeat_seconds(world_size: int) -> float:
    """Seconds between two heartbeats of a rank."""
    return max(2.0, world_size / 100)


class Connection:
    """One end of a connection; messages are dictionaries."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._rest = b""  # the incomplete last line that has come
        self._unsent = b""
        self._lock = threading.Lock()  # the main thread sends, too

    def send(self, **message: Any) -> None:
        """Send, unless the other end is gone or has read nothing for long."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock, suppress(OSError):
            if len(self._unsent) < 1 << 16:
                self._unsent += line
            # If only part of a message is sent, the rest must follow when the other end reads.
            self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None if the other end has closed, or is no rank."""
        try:
            data = self.connection.recv(1 << 16)
            if not data or len(self._rest) > 1 << 20:
                return None
            *lines, self._rest = (self._rest + data).split(b"\n")
            found = [json.loads(line) for line in lines]
            return found if all(isinstance(each, dict) for each in found) else None
        except BlockingIOError:
            return []
        except (OSError, ValueError, RecursionError):
            return None


@dataclass(eq=False)
class _RankStatus:
    link: Connection
    rank: int = -1
    place: str | None = None  # where it has an exception
    text: str = ""  # the text of the exception
    ended: bool = False
    progress: tuple[int, ...] = (0, 0)
    doing: str = "setting up"
    waits: bool = True  # whether it waits for other ranks
    heard: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)  # when it began ``doing``


class HeartbeatServer(threading.Thread):
    """The thread of rank 0 that hears all ranks and tells them whether they can go on.

    Connections that do not begin with ``token`` are closed. After ``stalled_after`` seconds without
    any progress the ranks behind are named; ``timeout`` is that of collectives.
    """

    def __init__(
        self, world_size: int, token: str, stalled_after: float, timeout: float, say: Any
    ) -> None:
        super().__init__(name="wlb-heartbeat", daemon=True)
        self._world_size, self._token, self._say = world_size, token, say
        self._stalled_after, self._timeout = stalled_after, timeout
        _allow_files(1024 + world_size)
        both = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=world_size + 100,  # a client that finds it full tries again a second later
            dualstack_ipv6=both,
        )
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[int, _RankStatus] = {}
        self._left: list[int] = []  # ranks whose run is over
        self._first: _RankStatus | None = None
        self._all_by = 0.0
        self._verdict = ""
        self._reported: object = None
        self._over = False
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)

    def wait_for_ends(self) -> None:
        """Wait ``AGREED_PATIENCE`` s at most for slower ranks, which die with their launcher."""
        last = time.monotonic() + AGREED_PATIENCE
        while self.is_alive() and time.monotonic() < last:
            if all(peer.ended for peer in list(self._peers.values())):
                return
            time.sleep(0.02)

    def stop(self) -> None:
        """End the run on this rank: the others are told so, and no longer watched."""
        self._over = True
        self._waker.close()
        self.join(2.0)

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        pause = heartbeat_seconds(self._world_size)
        due = time.monotonic()
        all_here_by = due + self._stalled_after
        try:
            while not self._over:
                for key, _ in self._selector.select(0.25):
                    if key.data is not None:
                        self._read(key.data)
                    elif key.fileobj is self._listener:
                        self._accept()
                now = time.monotonic()
                self._decide(now)
                # The listener closes once all have connected, so ranks that left are not missing.
                if now > all_here_by and self._listener.fileno() >= 0:
                    all_here_by = math.inf
                    missing = [n for n in range(1, self._world_size) if n not in self._peers]
                    self._say(
                        f"nothing has been heard on port {self.port} from"
                        f" {names_of_ranks(missing or [0])}, not started yet or kept away, perhaps"
                        " by other programs that take up the port. Let only the job's nodes reach"
                        " it. Until all ranks are connected the run is not watched."
                    )
                if now >= due:
                    due = now + pause
                    self._send_to_all(tick=True)
                    self._report_stall(now, pause)
        finally:
            # Also after a bug in this thread, which must not end a run that trains.
            self._send_to_all(ended=True)
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _send_to_all(self, **message: Any) -> None:
        for peer in self._peers.values():
            peer.link.send(**message)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(0.1)  # too many files are open, for now
            return
        self._selector.register(
            connection, selectors.EVENT_READ, _RankStatus(Connection(connection))
        )
        if len(self._selector.get_map()) > 2 * self._world_size + 100:
            self._drop_strangers(self._world_size)

    def _read(self, peer: _RankStatus) -> None:
        messages = peer.link.receive()
        for message in messages or ():
            if peer.rank < 0 and not self._admit(peer, message):
                messages = None
                break
            self._note(peer, message)
        if messages is None and peer.link.connection.fileno() >= 0:
            self._selector.unregister(peer.link.connection)
            peer.link.connection.close()
            if self._peers.pop(peer.rank, None) is not None and not peer.ended:
                self._on_death(peer)

    def _admit(self, peer: _RankStatus, message: dict[str, Any]) -> bool:
        """Whether the peer is a rank; after the last rank the listener is closed."""
        if not hmac.compare_digest(ascii(message.get("token")), ascii(self._token)):
            return False
        peer.rank = int(message["rank"])
        self._peers[peer.rank] = peer
        if len(self._peers) == self._world_size:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._drop_strangers(0)
        return True

    def _drop_strangers(self, but: int) -> None:
        """Close connections that have not said which rank they are, except the last ``but``."""
        keys = self._selector.get_map().values()
        strangers = [key.data.link.connection for key in keys if key.data and key.data.rank < 0]
        for each in strangers[: len(strangers) - but]:
            self._selector.unregister(each)
            each.close()

    def _note(self, peer: _RankStatus, message: dict[str, Any]) -> None:
        peer.heard = time.monotonic()
        if "doing" in message:
            peer.progress, peer.doing = tuple(message["progress"]), message["doing"]
            peer.since = peer.heard - message["seconds"]
            peer.waits = message.get("waits", True)
        if "place" in message:
            peer.place, peer.text = message["place"], message["text"]
            if self._first is None:
                patience = AGREED_PATIENCE if message.get("agreed") else PATIENCE
                self._first, self._all_by = peer, peer.heard + patience
        if "ended" in message and not peer.ended:
            peer.ended = True
            self._left.append(peer.rank)

    def _on_death(self, peer: _RankStatus) -> None:
        """Tell the others that a rank's process has ended before its run was over."""
        if peer.place is None or self._verdict == "together":
            cause = f"rank {peer.rank} has died without a word; it was at {peer.doing}"
            if self._verdict != "alone":
                self._say(cause)  # at once: NCCL may end this process, too, before it says more
            self._alone(cause)
        elif self._verdict == "":
            self._alone(self._cause())

    def _alone(self, cause: str) -> None:
        if self._verdict != "alone":
            self._verdict = "alone"
            self._send_to_all(alone=cause)

    def _cause(self) -> str:
        assert self._first is not None
        silent, busy = [], []
        for peer in self._peers.values():
            if time.monotonic() - peer.heard > 2 * heartbeat_seconds(self._world_size):
                # First, since it is the likelier cause: the others' error is their time-out.
                silent.append(f"rank {peer.rank} gives no sign of life")
            elif not (peer.place or peer.ended or peer.waits):
                busy.append(f"rank {peer.rank} did not wait for others, at {peer.doing}")
        failed = f"rank {self._first.rank} failed, {self._first.text}"
        return "; ".join([*silent, failed, *busy[:4], *self._over_on()])

    def _over_on(self) -> list[str]:
        return [f"the run of {names_of_ranks(self._left)} is over"] if self._left else []

    def _decide(self, now: float) -> None:
        """Decide whether the ranks that have failed have failed together."""
        if self._verdict or self._first is None:
            return
        places = [peer.place for peer in self._peers.values() if peer.place is not None]
        if len(set(places)) > 1 or any(peer.ended for peer in self._peers.values()):
            self._alone(self._cause())
        elif len(places) == self._world_size:
            self._verdict = "together"
            self._send_to_all(together=True)
        elif now > self._all_by:
            self._alone(self._cause())

    def _report_stall(self, now: float, pause: float) -> None:
        """Say once which ranks are behind if none makes progress."""
        peers = [peer for peer in self._peers.values() if not peer.ended]
        failed = self._first or self._verdict or not peers
        if failed or max(peer.since for peer in peers) > now - self._stalled_after:
            self._reported = None
            return
        stands = sorted((peer.rank, peer.progress, peer.doing) for peer in peers)
        if self._reported == stands:
            return
        silent = [peer for peer in peers if now - peer.heard > 3 * pause]
        least = min(peer.progress for peer in peers)
        last = [peer for peer in peers if peer.progress == least]
        behind = silent or [peer for peer in last if not peer.waits] or last
        others = [peer for peer in peers if peer not in behind]
        seconds = now - max(peer.since for peer in peers)
        # Work of all ranks together, or of one while the others wait (a save), may take long.
        patience = self._timeout / 2 if others else math.inf
        together = len(last) == len(peers) and least[1] != RUNNING
        if not silent and together and seconds < patience:
            return
        self._reported = stands
        self._say(
            f"no rank has got on for {seconds:.0f} s."
            f" {'No sign of life from' if silent else 'Furthest behind:'} {_shown(behind, now)}."
            + (f" The others wait: {_shown(others, now)}." if others else "")
            + "".join(f" But {each}." for each in self._over_on())
            + f" The time-out of {self._timeout:g} s ends the run."
        )
        for peer in behind[:4]:
            peer.link.send(stack=True)


def _allow_files(count: int) -> None:
    """Let this process open ``count`` files, if it may; the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = count if hard == unlimited else min(count, hard)
    if soft != unlimited and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _shown(peers: Iterable[_RankStatus], now: float) -> str:
    each = [f"rank {p.rank}, at {p.doing} (heard {now - p.heard:.0f} s ago)" for p in peers]
    return "; ".join(each[:4]) + (f"; and {len(each) - 4} more" if len(each) > 4 else "")
