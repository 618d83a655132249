"""Exchanges under rendezvous semantics: what ends, what stands still, what may not be open."""

from __future__ import annotations

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
