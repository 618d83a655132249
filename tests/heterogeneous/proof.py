"""All that the ranks of a step on pipelines of its own wait for, to be proven free of deadlock.

Beside the messages of each pipeline there are what travels before and after: parameters are pulled
and gradients pushed in slots, each a collective of all ranks, or over several nodes one of a rail
and one of a node, which a second thread of each rank posts when the first one has ended. A forward
waits for the slots of its stage; the last backward posts gradients as soon as they are complete.
And attention and tensor parallelism exchange in every unit of an action. All of it is listed here
thread by thread, as ``heterogeneous/parameters.py`` and ``heterogeneous/transfer.py`` do it, for
:func:`~tests.schedule.rendezvous.run_to_the_end`. Which it is that travels does not matter.

Cost: as many steps as ranks · slots, and as actions · units.
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
class Travel:
    """What travels to a step's pipelines and back.

    Args:
        units: of each rank, how many it uses; they come in so many slots.
        per_node: ranks of a node.
    """

    units: Sequence[int]
    per_node: int

    @property
    def hops(self) -> int:
        """Two where there are several nodes of several ranks, else one."""
        return 2 if 1 < self.per_node < len(self.units) else 1

    @property
    def slots(self) -> range:
        """Numbers of the slots."""
        return range(max(self.units))

    def post(self, rank: int, what: str, hop: int, slot: int) -> Post:
        """A rank's part in one collective; ``what``: ``"pull"`` or ``"push"``."""
        ranks = len(self.units)
        if self.hops == 1:
            return Post("all", (what, slot), ranks)
        node, place = divmod(rank, self.per_node)
        if hop == 0:
            return Post("rail", (what, slot, "rail", place), ranks // self.per_node)
        return Post("node", (what, slot, "node", node), self.per_node)


def threads_elsewhere(
    strategy: Sequence[Scheme],
    programs: Sequence[Sequence[Sequence[Action]]],
    travel: Travel,
    shared: Callable[[int, Action], Hashable] | None = None,
) -> list[Thread]:
    """What each rank does in a step: its own thread, and its relay's over two hops.

    Args:
        strategy: of the step, on all ranks.
        programs: of each pipeline one for each stage.
        travel: between rest and the step.
        shared: the actions that pipelines run together, see
            :func:`~lightning_wlb.schedule.programs.meetings_of`.
    """
    made = [
        _OfRank(rank, number, scheme, programs[number], travel, shared)
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
    travel: Travel
    shared: Callable[[int, Action], Hashable] | None
    steps: list[Post | Wait] = field(default_factory=list)
    relayed: list[Post | Wait] = field(default_factory=list)
    exchanges: set[Hashable] = field(default_factory=set)  # of attention, in its actions

    def __post_init__(self) -> None:
        self._unpushed = list(self.travel.slots)
        for slot in self.travel.slots:
            self._post("pull", 0, slot)
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
        self.steps += [self._arrives(slot) for slot in self.travel.slots]
        if self._unpushed:
            self._settle()
            self._push(0)
        self.steps += [Post("loss", "loss", len(self.travel.units)), Wait("loss")]
        self.steps += [
            Wait(self.travel.post(self.rank, "push", 0, slot).name) for slot in self.travel.slots
        ]

    def _forward(self, action: Action) -> None:
        for unit in range(self.travel.units[self.rank]):
            self.steps.append(self._arrives(unit))
            self.steps += self._exchanges(action, unit)

    def _backward(self, action: Action, *, pushes: bool) -> None:
        for unit in reversed(range(self.travel.units[self.rank])):
            self.steps += self._exchanges(action, unit)
            if pushes:
                self._push(unit)

    def _arrives(self, slot: int) -> Wait:
        return Wait(self.travel.post(self.rank, "pull", self.travel.hops - 1, slot).name)

    def _settle(self) -> None:
        """Wait until the relay has posted all that is pulled."""
        if self.travel.hops == 2:
            last = self.travel.post(self.rank, "pull", 1, self.travel.slots[-1])
            self.steps.append(Wait(last.name, posted=True))

    def _push(self, slot: int) -> None:
        """Post the gradients of all slots from this one on that have not been posted."""
        while self._unpushed and self._unpushed[-1] >= slot:
            self._post("push", self.travel.hops - 1, self._unpushed.pop())

    def _post(self, what: str, hop: int, slot: int) -> None:
        """Post the first of a slot's collectives, and let the relay post the other one."""
        post = self.travel.post(self.rank, what, hop, slot)
        self.steps.append(post)
        if self.travel.hops == 2:
            self.relayed += [Wait(post.name), self.travel.post(self.rank, what, 1 - hop, slot)]

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
