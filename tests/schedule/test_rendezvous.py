"""Exchanges under rendezvous semantics: what ends, what stands still, what may not be open."""

from __future__ import annotations

import pytest

from tests.schedule.rendezvous import Post, Stuck, Thread, Wait, run_to_the_end


def both(queue: str, name: str) -> list[Post | Wait]:
    return [Post(queue, name, 2), Wait(name)]


def test_an_exchange_ends_when_all_have_posted_it_and_it_is_first_everywhere() -> None:
    first = Thread(0, [Post("q", "a", 2), *both("q", "b")])
    assert run_to_the_end([first, Thread(1, [Post("q", "a", 2), *both("q", "b")])]) == []
    assert run_to_the_end([first, Thread(1, [*both("q", "b"), Post("q", "a", 2)])]) == [
        Stuck(0, Wait("b")),
        Stuck(1, Wait("b")),
    ], "a is before b on rank 0, and b before a on rank 1"
    other_queues = Thread(1, [*both("p", "b"), Post("q", "a", 2)])
    assert run_to_the_end([first, other_queues]) == [Stuck(0, Wait("b")), Stuck(1, Wait("b"))]
    apart = Thread(0, [Post("q", "a", 2), *both("p", "b")])
    assert run_to_the_end([apart, other_queues]) == [], "two queues do not wait for each other"


def test_what_nobody_waits_for_must_end_too() -> None:
    assert run_to_the_end([Thread(0, [Post("q", "a", 2)])]) == [Stuck(0, None)]


def test_threads_of_a_rank_run_side_by_side() -> None:
    """A second thread hands on what the first one posted, while that one waits elsewhere."""
    waits = Thread(0, [Post("rail", "a", 2), *both("node", "b")])
    relay = Thread(0, [Wait("a"), Post("node", "c", 2)])
    with pytest.raises(ValueError, match="rank 0: two threads post to node, in either order: b an"):
        run_to_the_end([waits, relay, Thread(1, [Post("rail", "a", 2), *both("node", "b")])])
    settled = Thread(0, [Post("rail", "a", 2), Wait("c", posted=True), *both("node", "b")])
    other = Thread(1, [Post("rail", "a", 2), Post("node", "c", 2), *both("node", "b")])
    assert run_to_the_end([settled, relay, other]) == []
