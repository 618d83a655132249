import re
from random import Random
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.strategy import mesh_choice, split_model
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.training import executor
from lightning_wlb.training import pipeline_messages as messages
from lightning_wlb.training.executor import check_digests
from tests.ranks import run_ranks
from tests.schedule.textbook import one_f_one_b
from tests.strategy.harness import CASES, WINDOW, data, module, trainer
from tests.strategy.random_plans import batch_of, model_of, plan_of, random_replica, run_step


class Clock(L.Callback):
    """Compares each step's timings with the rank's program."""

    def __init__(self) -> None:
        self.compared = {"train": 0, "validate": 0}

    def on_fit_start(self, trainer, pl_module) -> None:
        executor = trainer.strategy.executor
        assert executor.timings() == []
        assert executor.measure() is executor.measure()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._compare("train", trainer.strategy, batch, ("F", "B"))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._compare("validate", trainer.strategy, batch, ("F",))

    def _compare(self, what, strategy, batch, kinds) -> None:
        stages = strategy.mesh.pipeline
        program = one_f_one_b(strategy.rank.pipeline, stages, len(batch.micro_batches))
        timings = strategy.executor.timings()
        assert [t.action for t in timings] == [a for a in program if a.kind in kinds]
        assert all(timing.attention > 0 for timing in timings), "that of every action is counted"
        self.compared[what] += 1


def timed() -> dict[str, int]:
    clock = Clock()
    runner = trainer(
        WLBStrategy(1, 2), 2, callbacks=[clock], val_check_interval=2, num_sanity_val_steps=0,
        max_steps=2,
    )  # fmt: skip
    runner.fit(module(CASES[0]), data(CASES[0], validation_documents=5))
    return clock.compared


def held(counts: tuple[int, ...]) -> list[int]:
    """Most sends that a rank held at once in a step, for steps of so many micro-batches."""
    made = []

    class Recorded(messages.Messages):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            self.most_held = 0
            made.append(self)

        def send(self, *args) -> None:
            super().send(*args)
            self.most_held = max(self.most_held, len(self._sends) + len(self._local))

    executor.Messages = Recorded
    most = []
    for count in counts:
        options = {"micro_batches": count, "packing": "original", "cap": WINDOW}
        runner = trainer(WLBStrategy(1, 2), 2, max_steps=1)
        runner.fit(module(CASES[0]), data(CASES[0], **options))
        assert not made[-1]._sends
        assert not made[-1]._local
        most.append(made[-1].most_held)
    return most


def both(rank: int) -> tuple[dict[str, int], list[int]]:
    return timed(), held((4, 10))


def test_actions_are_those_of_the_schedule_and_sends_are_held_until_they_have_arrived():
    """Not until the step's end: as many for 10 micro-batches as for 4."""
    for compared, most_held in run_ranks(both, 2, process_group=False):
        assert compared["train"] == 2
        assert compared["validate"] >= 1
        assert most_held == [2, 2]


def disagreement(rank: int, mesh: tuple[int, ...], options: list[dict]) -> tuple[str, int]:
    """The error of a run whose ranks have different data settings, and the steps before it.

    Nobody has compared the settings themselves.
    """
    runner = trainer(WLBStrategy(*mesh), 2, max_steps=6)
    compared = (patch.object(each, "compare_ranks") for each in (mesh_choice, split_model))
    with next(compared), next(compared), pytest.raises(RuntimeError) as error:
        runner.fit(module(CASES[0]), data(CASES[0], **options[rank]))
    return str(error.value), runner.global_step


@pytest.mark.parametrize(
    ("mesh", "options", "step"),
    [
        ((2, 1, 1, 1), [{"seed": 0}, {"seed": 1}], 0),
        # The same first two steps; then one rank has reached its bound. Each rank hears of it
        # in the last collective of step 1.
        ((1, 2, 1, 1), [{}, {"max_tokens": WINDOW * 4}], 2),
    ],
    ids=["first step", "next digest"],
)
def test_ranks_with_different_plans_all_raise_and_name_the_digests(mesh, options, step):
    results = run_ranks(disagreement, 2, mesh, options, process_group=False)
    messages = {message for message, _ in results}
    assert len(messages) == 1, "every rank says the same"
    text = messages.pop()
    assert f"The ranks hold different plans for step {step}: digest " in text
    other = "no such step" if step else "digest [0-9a-f]{16}"
    found = re.search(rf"(digest [0-9a-f]{{16}}) on rank 0; ({other}) on rank 1\.", text)
    assert found, text
    assert found[1] != found[2]
    assert "the same document lengths, seed and data settings" in text
    assert all(steps <= step for _, steps in results)


class Mask(InMemoryDocuments):
    """Rank 1 masks a token that rank 0 does not, as many of both."""

    def __init__(self, sequences: list, rank: int) -> None:
        masks = [[True] * len(each) for each in sequences]
        masks[0][5 + rank] = False
        super().__init__(sequences, masks)


def copies(rank: int) -> list[str]:
    same = [[number, number + 1, number + 2] * 4 for number in range(40)]
    changed = [list(tokens) for tokens in same]
    changed[13][1] += rank  # one of those that are sampled: 39 · 5 / 15
    mixture = [
        {"documents": same, "weight": 1, "name": "first"},
        {"documents": changed[:14], "weight": 2, "name": "second"},
    ]
    messages = []
    for documents, options in (
        ({"mixture": mixture}, {}),
        (same, {"validation_documents": Mask(same, rank)}),
    ):
        settings = {"context_window": WINDOW, "micro_batches": 3, "num_workers": 0}
        with pytest.raises(RuntimeError, match="read different tokens or masks") as error:
            trainer(WLBStrategy(2), 2).fit(
                module(CASES[0]), WLBDataModule(documents, **settings, **options)
            )
        messages.append(str(error.value))
    return messages


def test_ranks_that_read_different_copies_raise_before_the_first_step():
    first, second = run_ranks(copies, 2, process_group=False)
    assert first == second
    for text, documents in zip(first, (14, 40), strict=True):
        found = re.search(
            rf"from (InMemoryDocuments|Mask) \({documents} documents, .*\): digest [0-9a-f]{{16}}"
            r" on rank 0; digest [0-9a-f]{16} on rank 1\. Every node must have the same documents",
            text,
        )
        assert found, text


def test_ranks_are_grouped_by_digest():
    check_digests([7, 7, 7], "step 3")
    with pytest.raises(RuntimeError) as error:
        check_digests([7] * 12 + [8], "step 3")
    assert (
        "for step 3: digest 0000000000000007 on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more;"
        " digest 0000000000000008 on rank 12."
    ) in str(error.value)


def test_a_first_stage_may_be_frozen():
    """No gradient enters it; those behind it are what they were, of sliced pieces too."""
    lengths = [7, 12, 3, 9]
    replica = random_replica(Random(0), lengths)
    batch = batch_of(plan_of(replica, lengths).validate(), lengths)
    whole, part = model_of(), model_of()
    part.embed.requires_grad_(False)
    part.layers["0"].requires_grad_(False)
    for model in (whole, part):
        run_step(model, batch, 2)
    for name, parameter in part.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name
        else:
            assert parameter.grad is None
