"""Where lengths come from."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_wlb.cli import lengths as of_lengths
from lightning_wlb.cli.lengths import STORE_FILES, load_lengths
from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.data.documents import InMemoryDocuments
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.planner import plan_steps
from lightning_wlb.planning.workloads import documents_for, generator_a

SETTINGS = {"context_window": 4096, "micro_batches": 2, "steps": 3, "seed": 1}


def test_the_generator_makes_enough_documents() -> None:
    lengths = load_lengths(
        "generator-a", **(SETTINGS | {"context_window": 131072, "micro_batches": 4})
    )
    assert np.array_equal(lengths, generator_a(documents_for(3, 4, 131072), 131072, 1))
    # In short windows documents are shorter than on average, and few are further from it.
    for seed in range(5):
        lengths = load_lengths("generator-a", **(SETTINGS | {"seed": seed}))
        planner = Planner(lengths, DataSettings(4096, 2), Work(PassWork(1, 1), PassWork(2, 2)))
        plans = plan_steps(planner, 3)
        assert {plan.epoch for plan in plans} == {0}
        assert sum(plan.tokens for plan in plans) >= 3 * 2 * 4096
        assert lengths.max() <= 4096


def test_text_may_have_words_or_lines(tmp_path) -> None:
    path = tmp_path / "lengths"
    path.write_text("3 1\n4\n\n1 5\n")
    assert load_lengths(str(path), **SETTINGS).tolist() == [3, 1, 4, 1, 5]


def test_pickled_arrays_are_not_loaded(tmp_path) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="not a list of lengths"):
        load_lengths(str(path), **SETTINGS)


@pytest.mark.parametrize("ending", ["", *STORE_FILES])
def test_folders_and_files_of_documents_are_opened_as_documents(
    tmp_path, monkeypatch, ending: str
) -> None:
    path = tmp_path / f"corpus{ending}"
    if ending:
        path.write_bytes(b"")
    else:
        path.mkdir()
    asked = []

    def opened(given: str) -> InMemoryDocuments:
        asked.append(given)
        return InMemoryDocuments([[1, 2, 3], [4]])

    monkeypatch.setattr(of_lengths, "documents", opened)
    assert load_lengths(str(path), **SETTINGS).tolist() == [3, 1]
    assert asked == [str(path)]


def test_a_mapping_names_documents_and_no_mixture(tmp_path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(5))
    np.save(tmp_path / "offsets.npy", [0, 3, 5])
    mapping = f"{{tokens: {tmp_path}/tokens.npy, offsets: {tmp_path}/offsets.npy}}"
    assert load_lengths(mapping, **SETTINGS).tolist() == [3, 2]
    with pytest.raises(ValueError, match=r"--lengths: a mixture takes its stores .* one by one"):
        load_lengths(f"{{mixture: [{{documents: {mapping}, weight: 1}}]}}", **SETTINGS)
    with pytest.raises(ValueError, match="--lengths: while parsing a flow mapping"):
        load_lengths("{tokens: a", **SETTINGS)


def test_documents_of_an_unknown_kind_are_a_mistake(tmp_path) -> None:
    with pytest.raises(ValueError, match=f"--lengths: documents='{tmp_path}'"):
        load_lengths(str(tmp_path), **SETTINGS)
