"""All that the ranks of a step on pipelines of its own wait for, to be proven free of deadlock.

Beside the messages of each pipeline there are what travels before and after: parameters are pulled
and gradients pushed in turns, each a collective of all ranks, or over several nodes one of a rail
and one of a node, which a second thread of each rank posts when the first one has ended. A forward
waits for the turns of its stage; the last backward posts gradients as soon as they are complete.
And attention and tensor parallelism exchange in every unit of an action. All of it is listed here
thread by thread, as ``parameters.py`` and ``parameter_transfer.py`` in that room do it, for
:func:`~tests.schedule.rendezvous.run_to_the_end`. Which it is that travels does not matter.

Cost: as many steps as ranks · turns, and as actions · buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_wlb.plan import Scheme
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action
from tests.schedule.proof import messages_of
from tests.schedule.rendezvous import Post, Thread, Wait


@dataclass(frozen=True)
class Exchanged:
    """The parameters and gradients of a step.

    Args:
        buckets: of each rank, how many it uses; they come in so many turns.
        per_node: ranks of a node.
    """

    buckets: Sequence[int]
    per_node: int

    @property
    def hops(self) -> int:
        """Two where there are several nodes of several ranks, else one."""
        return 2 if 1 < self.per_node < len(self.buckets) else 1

    @property
    def turns(self) -> range:
        """Numbers of the turns."""
        return range(max(self.buckets))

    def post(self, rank: int, what: str, hop: int, turn: int) -> Post:
        """A rank's part in one collective; ``what``: ``"pull"`` or ``"push"``."""
        ranks = len(self.buckets)
        if self.hops == 1:
            return Post("all", (what, turn), ranks)
        node, place = divmod(rank, self.per_node)
        if hop == 0:
            return Post("rail", (what, turn, "rail", place), ranks // self.per_node)
        return Post("node", (what, turn, "node", node), self.per_node)


def threads_of_step(
    strategy: Sequence[Scheme],
    programs: Sequence[Sequence[Sequence[Action]]],
    exchanged: Exchanged,
    shared: Callable[[int, Action], Hashable] | None = None,
) -> list[Thread]:
    """What each rank does in a step: its own thread, and its relay's over two hops.

    Args:
        strategy: of the step, on all ranks.
        programs: of each pipeline one for each stage.
        exchanged: between shards and the step.
        shared: the actions that pipelines run together, see
            :func:`~tests.schedule.support.meetings_of`.
    """
    made = [
        _OfRank(rank, number, scheme, programs[number], exchanged, shared)
        for number, scheme in enumerate(strategy)
        for rank in scheme.ranks
    ]
    together = Counter(name for each in made for name in each.exchanges)
    threads = []
    for each in made:
        joined = (
            Post(step.queue, step.name, together.get(step.name, step.ranks))
            if isinstance(step, Post)
            else step
            for step in each.steps
        )
        threads.append(Thread(each.rank, list(joined)))
        if each.relayed:
            threads.append(Thread(each.rank, each.relayed))
    return threads


@dataclass
class _OfRank:
    """One rank's two threads."""

    rank: int
    pipeline: int
    scheme: Scheme
    programs: Sequence[Sequence[Action]]
    exchanged: Exchanged
    shared: Callable[[int, Action], Hashable] | None
    steps: list[Post | Wait] = field(default_factory=list)
    relayed: list[Post | Wait] = field(default_factory=list)
    exchanges: set[Hashable] = field(default_factory=set)  # of attention, in its actions

    def __post_init__(self) -> None:
        self._unpushed = list(self.exchanged.turns)
        for turn in self.exchanged.turns:
            self._post("pull", 0, turn)
        stage, _, _ = self.scheme.place(self.rank)
        program = self.programs[stage]
        backwards = [action for action in program if action.kind == BACKWARD]
        for action in program:
            pushes = action in backwards[-1:] and self._name(action) is None
            if pushes:
                self._settle()
            self.steps += self._messages(True, action)
            if action.kind == FORWARD:
                self._forward(action)
            else:
                self._backward(action, pushes=pushes)
            self.steps += self._messages(False, action)
        sends = (each for action in program for each in self._messages(False, action))
        self.steps += [Wait(send.name) for send in sends]
        self.steps += [self._arrives(turn) for turn in self.exchanged.turns]
        if self._unpushed:
            self._settle()
            self._push(0)
        self.steps += [Post("loss", "loss", len(self.exchanged.buckets)), Wait("loss")]
        self.steps += [
            Wait(self.exchanged.post(self.rank, "push", 0, turn).name)
            for turn in self.exchanged.turns
        ]

    def _forward(self, action: Action) -> None:
        for unit in range(self.exchanged.buckets[self.rank]):
            self.steps.append(self._arrives(unit))
            self.steps += self._exchanges(action, unit)

    def _backward(self, action: Action, *, pushes: bool) -> None:
        for unit in reversed(range(self.exchanged.buckets[self.rank])):
            self.steps += self._exchanges(action, unit)
            if pushes:
                self._push(unit)

    def _arrives(self, turn: int) -> Wait:
        return Wait(self.exchanged.post(self.rank, "pull", self.exchanged.hops - 1, turn).name)

    def _settle(self) -> None:
        """Wait until the relay has posted all that is pulled."""
        if self.exchanged.hops == 2:
            last = self.exchanged.post(self.rank, "pull", 1, self.exchanged.turns[-1])
            self.steps.append(Wait(last.name, posted=True))

    def _push(self, turn: int) -> None:
        """Post the gradients of all turns from this one on that have not been posted."""
        while self._unpushed and self._unpushed[-1] >= turn:
            self._post("push", self.exchanged.hops - 1, self._unpushed.pop())

    def _post(self, what: str, hop: int, turn: int) -> None:
        """Post the first of a turn's collectives, and let the relay post the other one."""
        post = self.exchanged.post(self.rank, what, hop, turn)
        self.steps.append(post)
        if self.exchanged.hops == 2:
            self.relayed += [Wait(post.name), self.exchanged.post(self.rank, what, 1 - hop, turn)]

    def _messages(self, receives: bool, action: Action) -> list[Post | Wait]:
        scheme = self.scheme
        _, context, tensor = scheme.place(self.rank)
        chain = scheme.ranks[context * scheme.tensor + tensor :: scheme.context * scheme.tensor]
        return messages_of(receives, action, chain, len(chain))

    def _name(self, action: Action) -> Hashable:
        return None if self.shared is None else self.shared(self.pipeline, action)

    def _exchanges(self, action: Action, unit: int) -> Iterator[Post | Wait]:
        """Of attention with the ranks that share rows, and of those that share weights."""
        name, scheme = self._name(action), self.scheme
        stage, context, tensor = scheme.place(self.rank)
        if scheme.tensor > 1:
            weights = "tensor", self.pipeline, action, context, unit
            yield from (Post("tensor", weights, scheme.tensor), Wait(weights))
        if scheme.context > 1 or name is not None:
            own = (self.pipeline, action) if name is None else (name, stage)
            rows = "rows", own, tensor, unit
            self.exchanges.add(rows)
            yield from (Post(("rows", name is None), rows, 0), Wait(rows))
