"""Which checkpoint was saved last is known whatever the clocks of runs say."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.checkpoints import manifest
from lightning_wlb.checkpoints.manifest import CHECKPOINT, Manifest, Saver
from lightning_wlb.checkpoints.save_order import SavingRun, newest_first


def saved(time: float, run: str = "", number: int = 0, *known: str, step: int = 1) -> Manifest:
    return Manifest(CHECKPOINT, f"save {time}", 1, step, {}, Saver(run, number, known), time)


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.floats(0, 1e9), st.booleans()), min_size=1, max_size=6
    ),
    st.randoms(use_true_random=False),
)
def test_runs_that_follow_each_other(runs, chance) -> None:
    """Each with a clock of its own; some are of a version that did not write who saved."""
    order: list[Path] = []
    manifests: dict[Path, Manifest] = {}
    known: list[str] = []
    for number, (count, clock, old) in enumerate(runs):
        old = old and not order  # such a version comes first
        begun = tuple(known)
        for each in range(count):
            path = Path(f"{number}-{each}")
            time = clock + each if old else clock - each
            manifests[path] = saved(time, *(() if old else (f"run {number}", each, *begun)))
            known.append(manifests[path].save if old else f"run {number}")
            order.append(path)
    shuffled = list(manifests)
    chance.shuffle(shuffled)
    # What was saved for good and what was lost changes nothing among the others.
    left = {path: manifests[path] for path in shuffled if chance.random() < 0.8}
    assert newest_first(left) == [path for path in reversed(order) if path in left]


def test_strangers_go_by_the_clock() -> None:
    one = {Path(f"one {n}"): saved(n * 10.0, "one", n) for n in (1, 2, 3)}
    two = {Path(f"two {n}"): saved(n * 10.0 + 5, "two", n) for n in (1, 2, 3)}
    ordered = newest_first(one | two)
    assert [str(path) for path in ordered] == ["two 3", "one 3", "two 2", "one 2", "two 1", "one 1"]
    # Of the same time by the step, then the name; two names of one save are next to each other.
    same = {Path(name): saved(1.0, step=step) for name, step in (("a", 1), ("b", 2), ("c", 1))}
    assert [str(path) for path in newest_first(same)] == ["b", "c", "a"]


def test_manifests_that_contradict_each_other_are_sorted_in_some_order() -> None:
    circle = {Path(each): saved(1.0, each, 1, other) for each, other in pairwise("abca")}
    own = {Path("d"): saved(2.0, "d", 1, "d")}
    assert set(newest_first(circle | own)) == {*circle, *own}


def test_a_run_knows_what_is_beside_its_first_save_and_what_it_has_loaded(tmp_path) -> None:
    def put(folder: Path, by: Saver) -> None:
        folder.mkdir(parents=True)
        manifest.write(folder, Manifest(CHECKPOINT, folder.name, 1, 0, {}, by))

    put(tmp_path / "here" / "old version", Saver())
    put(tmp_path / "here" / "other", Saver("other", 1, ("before it",)))
    (tmp_path / "here" / "damaged").mkdir()
    (tmp_path / "here" / "file").write_text("no checkpoint")
    put(tmp_path / "elsewhere" / "loaded", Saver("loaded", 9))
    run = SavingRun("own")
    run.knows(tmp_path / "elsewhere" / "loaded")
    run.knows(tmp_path / "nowhere")
    first = run.next_save(tmp_path / "here")
    assert (first.run, first.number) == ("own", 1)
    assert set(first.known) == {"loaded", "old version", "other", "before it"}
    put(tmp_path / "here" / "late", Saver("late", 1))
    put(tmp_path / "here" / "mine", first)
    second = run.next_save(tmp_path / "here")
    assert second == Saver("own", 2, first.known), "a run beside it is a stranger"
    run.knows(tmp_path / "here" / "mine")
    assert "own" not in run.known


def test_a_stranger_does_not_make_what_a_run_saves_unreadable(tmp_path) -> None:
    """Whoever resumes from what others have saved knows their runs, of which they may name many."""
    (tmp_path / "theirs").mkdir()
    many = Saver("theirs", 1, tuple(f"{each:x}" for each in range(100_000)))
    manifest.write(tmp_path / "theirs", Manifest(CHECKPOINT, "save", 1, 1, {}, many))
    run = SavingRun("mine")
    run.knows(tmp_path / "theirs")
    saver = run.next_save(tmp_path)
    assert saver.known == (*many.known[-9_999:], "theirs")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_a_run_does_not_know_what_others_put_where_everybody_may_write(tmp_path) -> None:
    for name in ("theirs", "mine"):
        (tmp_path / name).mkdir()
        manifest.write(tmp_path / name, Manifest(CHECKPOINT, "save", 1, 1, {}, Saver(name, 1, ())))
    os.chown(tmp_path / "theirs", 65534, 65534)
    tmp_path.chmod(0o1777)
    assert SavingRun("run").next_save(tmp_path).known == ("mine",)
