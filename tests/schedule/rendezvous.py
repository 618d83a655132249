"""Whether threads that exchange with each other come to their ends, whatever a backend buffers.

An exchange, be it a message or a collective, ends only when all who take part have posted it, and
not before it is the first of its queue with each of them: on every rank a queue is worked off
first-in-first-out. A thread posts and goes on; where it waits for an exchange it goes on when that
has ended. What ends then ends on gloo and on NCCL.

One run proves it for all: each rank has one thread, and nothing that it may do is undone by what
others do later, so who is quicker does not matter.

Cost: O(posts and waits), and for each exchange those who take part.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Post(NamedTuple):
    """A rank's part in an exchange.

    Attributes:
        queue: of this rank.
        name: of the exchange, the same with all who take part and with no other.
        ranks: how many take part.
    """

    queue: Hashable
    name: Hashable
    ranks: int


class Wait(NamedTuple):
    """A thread goes on when the exchange of this name has ended."""

    name: Hashable


class Thread(NamedTuple):
    """What a rank does, in order."""

    rank: int
    steps: Sequence[Post | Wait]


class Stuck(NamedTuple):
    """A thread that stands still, and what it waits for; None: an exchange has not ended."""

    rank: int
    waits: Wait | None


def run_to_the_end(threads: Sequence[Thread]) -> list[Stuck]:
    """Advance every thread as far as it goes.

    Returns:
        The threads that never end, and ranks with exchanges that never do.
    """
    return _Run(threads).stuck()


class _Run:
    def __init__(self, threads: Sequence[Thread]) -> None:
        self._threads = threads
        self._at = [0] * len(threads)
        self._queues: dict[tuple[int, Hashable], deque[Post]] = defaultdict(deque)
        self._first: dict[Hashable, list[tuple[int, Hashable]]] = defaultdict(list)
        self._ended: set[Hashable] = set()
        self._waiting: dict[Hashable, list[int]] = defaultdict(list)  # threads, by exchange
        self._ready = deque(range(len(threads)))
        while self._ready:
            self._advance(self._ready.popleft())

    def stuck(self) -> list[Stuck]:
        """What stands still."""
        found = []
        for (rank, steps), at in zip(self._threads, self._at, strict=True):
            if at < len(steps):
                step = steps[at]
                assert isinstance(step, Wait)
                found.append(Stuck(rank, step))
        left = {rank for (rank, _), queue in self._queues.items() if queue}
        return found + [Stuck(rank, None) for rank in sorted(left - {each.rank for each in found})]

    def _advance(self, thread: int) -> None:
        rank, steps = self._threads[thread]
        while self._at[thread] < len(steps):
            step = steps[self._at[thread]]
            if isinstance(step, Post):
                self._post(rank, step)
            elif step.name not in self._ended:
                self._waiting[step.name].append(thread)
                return
            self._at[thread] += 1

    def _post(self, rank: int, post: Post) -> None:
        place = rank, post.queue
        self._queues[place].append(post)
        if len(self._queues[place]) == 1:
            self._be_first(place)

    def _be_first(self, place: tuple[int, Hashable]) -> None:
        """An exchange is the first of a queue: it, and what was behind it, may end."""
        places = [place]
        while places:
            place = places.pop()
            post = self._queues[place][0]
            there = self._first[post.name]
            there.append(place)
            if len(there) < post.ranks:
                continue
            self._ended.add(post.name)
            self._wake(post.name)
            for each in there:
                queue = self._queues[each]
                queue.popleft()
                if queue:
                    places.append(each)

    def _wake(self, name: Hashable) -> None:
        self._ready.extend(self._waiting.pop(name, ()))
