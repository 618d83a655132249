"""What other threads read of the main thread, at whatever moment they read it."""

from types import SimpleNamespace

from lightning_wlb.schedule.actions import FORWARD, Action
from lightning_wlb.supervision.progress import REDUCING, RUNNING, Progress


class Batch:
    """A step of some documents, a micro-batch each; ``meanwhile`` happens while it is looked at."""

    replica = 1

    def __init__(self, step: int, documents: list[int], meanwhile=lambda: None, schemes=()) -> None:
        self._step, self._meanwhile, self._schemes = step, meanwhile, schemes
        self.own_plan = SimpleNamespace(
            slices=[SimpleNamespace(document=each) for each in documents],
            forward=[SimpleNamespace(slices=[number]) for number in range(len(documents))],
        )

    @property
    def plan(self):
        self._meanwhile()
        return SimpleNamespace(step=self._step, schemes=self._schemes)


def test_a_step_from_its_beginning_to_its_end():
    here = Progress()
    assert (here.progress(), str(here)) == ((0, 0), "before the first step, setting up")
    here.begin_step(Batch(7, [5, 3]))
    here.note(RUNNING, Action(0, FORWARD, 1))
    assert (here.progress(), here.action) == ((1, RUNNING), Action(0, FORWARD, 1))
    assert str(here) == "step 7, action 0F1 of documents 3"
    here.note(REDUCING, "its reduction")
    assert (here.progress(), here.action, str(here)) == (
        (1, REDUCING),
        None,
        "step 7, its reduction",
    )


def test_a_step_that_ends_while_it_is_read_is_told_as_it_was():
    here = Progress()

    def next_step():
        here.begin_step(Batch(8, [5, 3, 2]))
        here.note(RUNNING, Action(0, FORWARD, 2))

    here.begin_step(Batch(7, [4], next_step))
    here.note(RUNNING, Action(0, FORWARD, 0))
    assert str(here) == "step 7, action 0F0 of documents 4"
    assert str(here) == "step 8, action 0F2 of documents 2"
