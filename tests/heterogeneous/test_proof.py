"""A step on pipelines of its own, all that its ranks wait for: no order of it can deadlock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_wlb.plan import Scheme
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.programs import make_programs
from tests.heterogeneous.proof import Travel, threads_elsewhere
from tests.schedule.rendezvous import Post, Thread, Wait, run_to_the_end

LAYERS = 3
TWO_NODES = (Scheme(0, (1, 2)), Scheme(2, (3,), context=2))
"""Of two ranks each: neighbours in a pipeline share the first node."""


def units(strategy: Sequence[Scheme]) -> list[int]:
    """Of each rank: its layers, and the ends."""
    ends = [(len(each.stages), *each.place(rank)) for each in strategy for rank in each.ranks]
    layers = [each.stages[each.place(r)[0]] for each in strategy for r in each.ranks]
    return [
        n + (stage == 0) + (stage == stages - 1)
        for n, (stages, stage, *_) in zip(layers, ends, strict=True)
    ]


def threads(
    strategy: Sequence[Scheme], micro_batches: Sequence[int], per_node: int, schedule="1f1b", *more
) -> list[Thread]:
    programs = [
        make_programs(schedule, len(scheme.stages), count)
        for scheme, count in zip(strategy, micro_batches, strict=True)
    ]
    return threads_elsewhere(strategy, programs, Travel(units(strategy), per_node), *more)


@st.composite
def steps(draw: st.DrawFn) -> tuple[tuple[Scheme, ...], list[int], int, str]:
    """A strategy, micro-batches of each of its pipelines, ranks of a node, a schedule."""
    per_node, nodes = draw(st.sampled_from(((1, 4), (8, 1), (2, 2), (2, 4), (4, 2), (3, 3))))
    ranks, first = per_node * nodes, 0
    strategy: list[Scheme] = []
    stages = st.sampled_from(((3,), (1, 2), (1, 1, 1)))
    sizes = st.tuples(stages, st.integers(1, 3), st.integers(1, 2))
    for shape in draw(st.lists(sizes, max_size=4)):
        scheme = Scheme(first, *shape)
        if scheme.ranks.stop <= ranks:
            strategy.append(scheme)
            first = scheme.ranks.stop
    strategy += [Scheme(rank, (LAYERS,)) for rank in range(first, ranks)]
    counts = [draw(st.integers(0, 4)) for _ in strategy]
    return tuple(strategy), counts, per_node, draw(st.sampled_from(("1f1b", "gpipe")))


@settings(max_examples=25, deadline=None)
@example((TWO_NODES, [3, 0], 2, "1f1b"))
@given(steps())
def test_no_step_can_deadlock(step) -> None:
    strategy, counts, per_node, schedule = step
    assert run_to_the_end(threads(strategy, counts, per_node, schedule)) == []


def test_nor_can_one_whose_pipelines_share_micro_batches() -> None:
    """The first of each; the last backward is of a shared one, and gradients are behind it."""
    strategy = (Scheme(0, (1, 2)), Scheme(2, (1, 2)), Scheme(4, (3,)), Scheme(5, (3,)))

    def shared(pipeline: int, action: Action):
        return ("both", action) if pipeline < 2 and action.micro_batch == 2 else None

    made = threads(strategy, [3, 3, 1, 0], 3, "1f1b", shared)
    assert run_to_the_end(made) == []
    posts = [step for step in made[0].steps if isinstance(step, Post)]
    assert [post.queue for post in posts[-4:]] == [*["node"] * 3, "loss"]
    assert [post.ranks for post in posts if post.queue == ("rows", False)] == [2] * 4


def in_one_thread(made: list[Thread]) -> list[Thread]:
    """The second hop of what is pulled is posted where a step's own thread waits for it."""
    changed = []
    for thread in made:
        if isinstance(thread.steps[0], Wait):  # a relay's: what it hands on, but for pulls
            pushes = [n for n, each in enumerate(thread.steps) if each.name[0] == "push"]
            changed.append(thread._replace(steps=thread.steps[pushes[0] :]))
            continue
        steps: list[Post | Wait] = []
        posted = set()
        for step in thread.steps:
            if isinstance(step, Wait) and step.name[0] == "pull" and step.name not in posted:
                posted.add(step.name)
                rail = next(e.name for e in thread.steps if e.name[:2] == step.name[:2])
                steps += [Wait(rail), Post("node", step.name, 2)]
            steps.append(step)
        changed.append(thread._replace(steps=steps))
    return changed


def test_neighbours_that_wait_for_each_others_activations_must_not_have_to_hand_on_parameters():
    made = threads(TWO_NODES, [2, 1], 2)
    assert run_to_the_end(made) == []
    stuck = {each.rank: each.waits.name for each in reversed(run_to_the_end(in_one_thread(made)))}
    assert stuck[0] == ("pull", 0, "node", 0), "rank 1 has not come to hand it out"
    assert stuck[1].action == Action(1, "F", 0)


def test_what_is_pushed_must_not_overtake_what_the_relay_still_has_to_post() -> None:
    """A rank uses fewer slots than there are, and has done so when the last of them travel."""
    hasty = [
        thread._replace(steps=[each for each in thread.steps if not getattr(each, "posted", False)])
        for thread in threads(TWO_NODES, [1, 1], 2)
    ]
    with pytest.raises(ValueError, match=r"two threads post to node, in either order: \('pu"):
        run_to_the_end(hasty)
