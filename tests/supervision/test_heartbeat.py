"""What rank 0 makes of what the ranks tell it."""

import resource
import socket
import threading
import time

import pytest

from lightning_wlb.supervision import heartbeat
from lightning_wlb.supervision.heartbeat import Connection, HeartbeatServer


class Job:
    """A heartbeat server and connections of ranks to it."""

    def __init__(
        self,
        world_size: int,
        stalled_after: float = 60.0,
        stranger: bytes = b"",
        timeout: float = 600.0,
    ) -> None:
        self.said: list[str] = []
        given = world_size, "secret", stalled_after, timeout
        self.server = HeartbeatServer(*given, self.said.append)
        self.server.start()
        self.stranger = self.connect()
        self.stranger.connection.send(stranger)
        self.links = [self.connect() for _ in range(world_size)]
        for rank, link in enumerate(self.links):
            link.send(rank=rank, token="secret")
        # So that every rank is known before a test goes on.
        for rank in range(world_size):
            assert "tick" in self.hear(rank)

    def connect(self) -> Connection:
        return Connection(socket.create_connection(("127.0.0.1", self.server.port)))

    def hear(self, rank: int) -> dict:
        """The next message but signs of life, which count only where nothing else comes."""
        end, ticks = time.monotonic() + 5, {}
        while time.monotonic() < end:
            for link in self.links:
                link.send(alive=True)
            for message in self.links[rank].receive() or ():
                if "tick" not in message:
                    return message
                ticks = message
            if ticks:
                return ticks
            time.sleep(0.01)
        raise AssertionError(f"rank {rank} heard nothing")

    def answer(self, rank: int) -> dict:
        message: dict = {"tick": True}
        while "tick" in message:
            message = self.hear(rank)
        return message


@pytest.fixture
def start(monkeypatch):
    """Starts jobs, and stops them after the test."""
    monkeypatch.setattr(heartbeat, "PATIENCE", 0.5)
    monkeypatch.setattr(heartbeat, "heartbeat_seconds", lambda world_size: 0.1)
    jobs = []

    def make(*arguments, **options) -> Job:
        jobs.append(Job(*arguments, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.server.stop()


def test_ranks_that_end_later_are_waited_for(start, monkeypatch):
    monkeypatch.setattr(heartbeat, "AGREED_PATIENCE", 5.0)
    job = start(2)
    job.links[0].send(ended=True)
    sent = []

    def end() -> None:
        sent.append(1)
        job.links[1].send(ended=True)

    threading.Timer(0.5, end).start()
    job.server.wait_for_ends()
    assert sent == [1]
    job.links[1].connection.close()
    job.server.wait_for_ends()
    # One that never says so is given up.
    monkeypatch.setattr(heartbeat, "AGREED_PATIENCE", 0.3)
    job = start(2)
    job.server.wait_for_ends()


def test_a_rank_that_fails_alone_is_named_after_a_while(start):
    job = start(3)
    job.links[1].send(place="step 2", text="it rained")
    assert job.answer(0) == {"alone": "rank 1 failed, it rained"}


def test_a_rank_that_has_agreed_to_come_may_be_late(start):
    job = start(2)
    job.links[1].send(place="step 2", text="SIGTERM", agreed=True)
    end = time.monotonic() + 2 * heartbeat.PATIENCE
    while time.monotonic() < end:
        assert "tick" in job.hear(1)
    job.links[0].send(place="step 2", text="SIGTERM", agreed=True)
    assert [job.answer(rank) for rank in range(2)] == [{"together": True}] * 2


def test_failing_at_two_places_is_not_together(start):
    job = start(2)
    job.links[1].send(place="step 2", text="it rained")
    assert "tick" in job.hear(0)
    job.links[0].send(place="step 3", text="it snowed")
    assert job.answer(0) == {"alone": "rank 1 failed, it rained"}


@pytest.mark.parametrize("together", [False, True], ids=["in a step", "in a common save"])
def test_a_rank_that_dies_is_named_at_once(start, together):
    job = start(2)
    job.links[1].send(progress=(4, 1), doing="step 3, action 0F0", seconds=0.0)
    if together:
        for link in job.links:
            link.send(place="step 2", text="it rained")
        assert [job.answer(rank) for rank in range(2)] == [{"together": True}] * 2
    job.links[1].connection.close()
    died = "rank 1 has died without a word; it was at step 3, action 0F0"
    assert job.answer(0) == {"alone": died}


def test_a_rank_whose_run_is_over_may_leave(start):
    job = start(2)
    job.links[1].send(ended=True)
    job.links[1].connection.close()
    time.sleep(0.2)
    assert "tick" in job.hear(0)
    job.links[0].send(place="step 2", text="it rained")
    cause = "rank 0 failed, it rained; the run of rank 1 is over"
    assert job.answer(0) == {"alone": cause}
    job.server.stop()
    assert job.answer(0) == {"ended": True}


def test_the_rank_that_is_behind_is_named_and_asked_for_its_stack(start):
    job = start(3, stalled_after=0.3)
    for rank, (progress, doing) in enumerate(
        [((4, 1), "step 3, action 0F0 of documents 5"), ((3, 6), "the loader"), ((4, 1), "step 3")]
    ):
        job.links[rank].send(progress=progress, doing=doing, seconds=0.0)
    begin = time.monotonic()
    while not job.said and time.monotonic() - begin < 5:
        for rank in range(3):  # signs of life, without getting on
            job.links[rank].send(alive=True)
        time.sleep(0.02)
    assert len(job.said) == 1
    assert "Furthest behind: rank 1, at the loader" in job.said[0]
    assert "The others wait: rank 0, at step 3, action 0F0 of documents 5" in job.said[0]
    assert job.answer(1) == {"stack": True}
    job.server.stop()
    assert job.answer(0) == {"ended": True}, "those that wait are not asked"


def test_a_rank_without_a_sign_of_life_is_named_first(start):
    job = start(2, stalled_after=1.0)
    begin = time.monotonic()
    while not job.said and time.monotonic() - begin < 5:
        job.links[0].send(progress=(1, 0), doing="waiting", seconds=9.0)
        time.sleep(0.02)
    assert "No sign of life from rank 1, at setting up" in job.said[0]


def test_a_rank_out_of_reach_is_the_cause_of_those_that_gave_up_waiting(start):
    job = start(3)
    unreachable = job.links.pop()
    time.sleep(0.3)
    for rank, place in enumerate("ab"):
        job.links[rank].send(place=place, text="its reduction: timed out")
    cause = "rank 2 gives no sign of life; rank 0 failed, its reduction: timed out"
    assert job.answer(1) == {"alone": cause}
    job.links.append(unreachable)


def test_a_rank_that_sleeps_where_the_others_wait_is_named(start):
    """As in a callback of the user's own before the first step; the others' time-out follows."""
    job = start(2, stalled_after=0.3, timeout=1.0)
    setting_up = {"progress": (0, 0), "doing": "setting up", "seconds": 0.4}
    begin = time.monotonic()
    while not job.said and time.monotonic() - begin < 5:
        job.links[0].send(waits=True, **setting_up)
        job.links[1].send(waits=False, **setting_up)
        time.sleep(0.02)
        setting_up["seconds"] += 0.02
    assert time.monotonic() - begin > 0.05, "not before half of the time-out"
    assert "Furthest behind: rank 1, at setting up" in job.said[0]
    assert "The others wait: rank 0, at setting up" in job.said[0]
    job.links[0].send(place="here", text="timed out")
    cause = "rank 0 failed, timed out; rank 1 did not wait for others, at setting up"
    assert job.answer(0) == {"alone": cause}


def test_a_rank_that_has_left_the_run_is_named_to_those_that_wait_for_it(start):
    job = start(2, stalled_after=0.3)
    job.links[1].send(ended=True)
    begin = time.monotonic()
    while not job.said and time.monotonic() - begin < 5:
        job.links[0].send(progress=(3, 1), doing="step 2", seconds=9.0)
        time.sleep(0.02)
    assert "rank 0, at step 2" in job.said[0]
    assert "But the run of rank 1 is over." in job.said[0]


def test_nothing_is_said_where_all_do_the_same_between_steps(start):
    job = start(2, stalled_after=0.3)
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        for link in job.links:
            link.send(progress=(3, 4), doing="step 2, the saving of a checkpoint", seconds=9.0)
        time.sleep(0.02)
    assert not job.said


@pytest.mark.parametrize(
    "says",
    [
        b'{"rank": 1, "token": "guessed", "place": "step 2", "text": "it rained"}\n',
        b'{"rank": 1, "token": "\\ud800"}\n',
        b"[" * 50_000 + b"\n",
        b"[[7, 1], [2305843009213693958, 1]]\n",  # pairs, whose numbers have one hash
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["guesses", "surrogate", "nests", "pairs", "browser"],
)
def test_a_stranger_is_turned_away(start, says):
    job = start(2, stranger=says)
    end = time.monotonic() + 5
    while job.stranger.receive() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert job.stranger.receive() is None, "its connection is closed"
    assert "tick" in job.hear(0)
    with pytest.raises(ConnectionRefusedError):
        job.connect()  # all ranks are there


def test_what_was_sent_in_part_is_continued_when_the_other_end_reads_again():
    """A rank that was stopped for long is not taken for a stranger, and dead, when it goes on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = Connection(socket.create_connection(server.getsockname()))
        receiver = Connection(server.accept()[0])
    for number in range(400):
        sender.send(number=number, text="x" * 30_000)
    came = []
    for _ in range(1000):
        messages = receiver.receive()
        assert messages is not None, "what comes is no message"
        came += [message["number"] for message in messages]
        sender.send(number=400, text="")
        if 400 in came:
            break
    assert came[-1] == 400
    assert came == sorted(came)
    for end in (sender, receiver):
        end.connection.close()


def test_rank_0_may_open_a_file_for_every_rank():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        large = HeartbeatServer(2000, "secret", 60.0, 600.0, print)
        large.start()
        large.stop()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (3024, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_rank_that_leaves_before_rank_0_was_heard():
    server = HeartbeatServer(2, "secret", 0.3, 600.0, (said := []).append)
    server.start()
    try:
        address = "127.0.0.1", server.port
        ranks = [Connection(socket.create_connection(address)) for _ in range(2)]
        for rank, each in enumerate(ranks):
            each.send(rank=rank, token="secret")
        ranks[1].send(ended=True)
        end = time.monotonic() + 20
        while len(server._peers) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        ranks[1].connection.close()
        while len(server._peers) > 1 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(server._peers) == 1
        time.sleep(1.0)  # two rounds of the server beyond the time by which all are to be there
        assert said == []
    finally:
        server.stop()
        for each in ranks:
            each.connection.close()


def test_strangers_who_come_first_neither_stay_nor_keep_a_rank_out(start):
    server = HeartbeatServer(2, "secret", 0.3, 600.0, (said := []).append)
    server.start()
    try:
        crowd = [
            Connection(socket.create_connection(("127.0.0.1", server.port))) for _ in range(300)
        ]
        end = time.monotonic() + 20
        while not said and time.monotonic() < end:
            time.sleep(0.01)
        assert "from rank 1, not started yet" in said[0]
        assert len(server._selector.get_map()) <= 2 * 2 + 101
        for rank in range(2):
            crowd.append(Connection(socket.create_connection(("127.0.0.1", server.port))))
            crowd[-1].send(rank=rank, token="secret")
        while len(server._selector.get_map()) > 3 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(server._selector.get_map()) == 3, "two ranks, and what wakes the thread"
        assert sum("nothing has been heard" in each for each in said) == 1
    finally:
        server.stop()
        for each in crowd:
            each.connection.close()
