"""All that the ranks of a step on pipelines of its own wait for, to be proven free of deadlock.

Beside the messages of each pipeline there are what travels before and after: parameters are pulled
and gradients pushed in turns, each a collective of all ranks. A forward waits for the turns of its
stage; the last backward posts gradients as soon as they are complete, or when it is over if
pipelines share its micro-batch. And attention and tensor parallelism exchange in every unit of an
action. All of it is listed here rank by rank, as ``parameters.py`` in that room does it, for
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


def threads_of_step(
    strategy: Sequence[Scheme],
    programs: Sequence[Sequence[Sequence[Action]]],
    buckets: Sequence[Sequence[bool]],
    shared: Callable[[int, Action], Hashable] | None = None,
) -> list[Thread]:
    """What each rank does in a step.

    Args:
        strategy: of the step, on all ranks.
        programs: of each pipeline one for each stage.
        buckets: of each rank those that it uses, by turn: whether a part of each is frozen, so that
            it is open until the backward is over.
        shared: the actions that pipelines run together, see
            :func:`~tests.schedule.support.meetings_of`.
    """
    made = [
        _OfRank(rank, number, scheme, programs[number], buckets, shared)
        for number, scheme in enumerate(strategy)
        for rank in scheme.ranks
    ]
    together = Counter(name for each in made for name in each.exchanges)
    return [
        Thread(
            each.rank,
            [
                Post(step.queue, step.name, together.get(step.name, step.ranks))
                if isinstance(step, Post)
                else step
                for step in each.steps
            ],
        )
        for each in made
    ]


@dataclass
class _OfRank:
    """What one rank does."""

    rank: int
    pipeline: int
    scheme: Scheme
    programs: Sequence[Sequence[Action]]
    buckets: Sequence[Sequence[bool]]
    shared: Callable[[int, Action], Hashable] | None
    steps: list[Post | Wait] = field(default_factory=list)
    exchanges: set[Hashable] = field(default_factory=set)  # of attention, in its actions

    def __post_init__(self) -> None:
        self._own = len(self.buckets[self.rank])
        turns = range(max(map(len, self.buckets)))
        self._unpushed = list(turns)
        for turn in turns:
            self._post("pull", turn)
        stage, _, _ = self.scheme.place(self.rank)
        program = self.programs[stage]
        backwards = [action for action in program if action.kind == BACKWARD]
        for action in program:
            last = action in backwards[-1:]
            self.steps += self._messages(True, action)
            if last:  # the turns of others close as it begins
                self.steps += [Wait(("pull", turn)) for turn in turns[self._own :]]
            early = last and self._name(action) is None
            if early:
                self._push(self._own)
            if action.kind == FORWARD:
                self._forward(action)
            else:
                self._backward(action, pushes=early)
            self.steps += self._messages(False, action)
            if last:
                self._push(0)
        sends = (each for action in program for each in self._messages(False, action))
        self.steps += [Wait(send.name) for send in sends]
        self.steps += [Wait(("pull", turn)) for turn in turns]
        self._push(0)
        self.steps += [Post("loss", "loss", len(self.buckets)), Wait("loss")]
        self.steps += [Wait(("push", turn)) for turn in turns]

    def _forward(self, action: Action) -> None:
        for unit in range(self._own):
            self.steps.append(Wait(("pull", unit)))
            self.steps += self._exchanges(action, unit)

    def _backward(self, action: Action, *, pushes: bool) -> None:
        for unit in reversed(range(self._own)):
            self.steps += self._exchanges(action, unit)
            if pushes and not any(self.buckets[self.rank][unit:]):
                self._push(unit)

    def _push(self, turn: int) -> None:
        """Post the gradients of all turns from this one on that have not been posted."""
        while self._unpushed and self._unpushed[-1] >= turn:
            self._post("push", self._unpushed.pop())

    def _post(self, what: str, turn: int) -> None:
        self.steps.append(Post("all", (what, turn), len(self.buckets)))

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
