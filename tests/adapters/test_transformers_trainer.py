"""transformers' Trainer and TRL's SFTTrainer with balanced steps, on two real ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from tests.adapters.trainers import RANKS, STEPS, document_by_document, tiny_llama, train_and_resume
from tests.ranks import run_ranks


def assert_as_one_process(found, steps: int) -> None:
    losses, parameters = document_by_document(steps)
    for said, state in found:
        torch.testing.assert_close(
            torch.tensor(said), torch.tensor(losses[-len(said) :]), rtol=1e-10, atol=0
        )
        for name, expected in parameters.items():
            torch.testing.assert_close(state[name], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["transformers", "trl"])
def test_two_ranks_are_one_process_document_by_document(tmp_path: Path, kind: str) -> None:
    if kind == "trl":
        pytest.importorskip("trl")
    attention = "wlb_packed" if kind == "trl" else "sdpa"
    given = (str(tmp_path), kind, attention, STEPS)
    found = run_ranks(train_and_resume, RANKS, *given, process_group=False, timeout=100)
    assert_as_one_process([each[0] for each in found], STEPS)
    for whole, *resumed in found if kind == "transformers" else ():
        # From the first step's checkpoint the second epoch begins after a part of the first.
        assert [len(said) for said, _ in resumed] == [STEPS, STEPS]
        for _, parameters in resumed:
            assert all(torch.equal(whole[1][name], parameters[name]) for name in whole[1])


def test_attention_by_sequence_is_that_of_masks() -> None:
    import lightning_wlb.adapters.transformers_trainer as adapter

    rows = [{"input_ids": list(range(size))} for size in (5, 1, 9)]
    batch = adapter.packed_collator()(rows)
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 6, 15]
    outputs = [tiny_llama(name)(**batch) for name in ("sdpa", "wlb_packed")]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=1e-10, atol=1e-12)
    without = {name: batch[name] for name in ("input_ids", "position_ids")}
    torch.testing.assert_close(
        tiny_llama("wlb_packed")(**without).logits, outputs[0].logits, rtol=1e-10, atol=1e-12
    )
    with pytest.raises(ValueError, match="needs one row"):
        tiny_llama("wlb_packed")(input_ids=torch.ones(2, 3, dtype=torch.long))
    both_ways = tiny_llama("wlb_packed")
    for layer in both_ways.model.layers:  # as a model's folder may say
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="knows no attention to later tokens"):
        both_ways(**batch)


def test_lengths_of_data_sets() -> None:
    from datasets import Dataset

    from lightning_wlb.adapters.transformers_trainer import sequence_lengths

    rows = [{"input_ids": [1] * size} for size in (3, 7, 2)]
    assert sequence_lengths(rows).tolist() == [3, 7, 2]
    dataset = Dataset.from_list(rows)
    assert sequence_lengths(dataset).tolist() == [3, 7, 2]
    assert sequence_lengths(dataset.select([2, 0])).tolist() == [2, 3]


@pytest.mark.parametrize("change", [{"model_accepts_loss_kwargs": False}, {"average": False}])
def test_a_loss_that_is_a_mean_over_each_micro_batch_is_refused(change: dict) -> None:
    """Its tokens would count differently by rank and micro-batch, which balancing makes unequal."""
    import lightning_wlb.adapters.transformers_trainer as adapter

    average = change.pop("average", True)
    given = {"model_accepts_loss_kwargs": True, "compute_loss_func": None, **change}
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=2, average_tokens_across_devices=average),
        accelerator=SimpleNamespace(split_batches=False),
        train_dataset=[{"input_ids": [1, 2]}],
        **given,
    )
    with pytest.raises(ValueError, match="divides by the targets of the whole step"):
        adapter.BalancedTraining.get_train_dataloader(trainer)


def test_rows_that_make_no_whole_step_are_told_of() -> None:
    import lightning_wlb.adapters.transformers_trainer as adapter

    sizes = {"train_batch_size": 2, "gradient_accumulation_steps": 2, "world_size": 1}
    trainer = SimpleNamespace(
        args=SimpleNamespace(**sizes, average_tokens_across_devices=True, seed=0, data_seed=None),
        accelerator=SimpleNamespace(split_batches=False),
        train_dataset=[{"input_ids": [1, 2]}] * 3,
        model_accepts_loss_kwargs=True,
        work=None,
    )
    with (
        pytest.warns(UserWarning, match="^3 of 3 rows make no whole step"),
        pytest.raises(AttributeError),
    ):
        adapter.BalancedTraining.get_train_dataloader(trainer)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sliding_window"])
def test_attention_by_sequence_refuses_what_it_would_leave_out(name: str) -> None:
    import lightning_wlb.adapters.transformers_trainer as adapter

    rows = torch.ones(1, 2, 3, 4)
    given = {"cu_seq_lens_q": torch.tensor([0, 3]), name: 1.0}
    with pytest.raises(ValueError, match="attention sinks or capped scores"):
        adapter.attend_by_sequence(None, rows, rows, rows, None, **given)
    with pytest.raises(ValueError, match="chunks"):
        adapter._without_mask(batch_size=1, local_size=8192)


def test_an_epoch_that_a_callback_has_ended_is_not_begun_again() -> None:
    from lightning_wlb.adapters.transformers_trainer import _FromTrainer

    def made():
        lengths = [3, 7, 2, 5, 8, 4, 9, 6]
        sampler = _FromTrainer(lengths, sequences=2, ranks=1, work=lambda tokens: tokens)
        sampler.trainer = SimpleNamespace(state=SimpleNamespace(epoch=0))
        return sampler

    whole, broken = made(), made()
    first = list(whole)
    whole.trainer.state.epoch = 1.0
    second = list(whole)
    assert first != second, "orders of two epochs"
    assert next(iter(broken)) == first[0]
    # The Trainer counts a part of an epoch, and then begins the second.
    broken.trainer.state.epoch = 0.25
    broken.set_epoch(1)
    assert list(broken) == second
