"""Text of the command line: models, and lengths of documents."""

import json
import sys

import numpy as np
import pyarrow as pa
import pytest

from lightning_wlb.cli.main import main
from lightning_wlb.cli.shared_options import (
    STORE_FILES,
    given_model,
    load_lengths,
    model_config,
)
from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.planner import plan_steps
from lightning_wlb.planning.synthetic_lengths import documents_for, generator_a
from tests.data.stores.corpora import write_arrow


def test_a_model_by_preset_by_sizes_and_by_both() -> None:
    assert model_config("7b") == TransformerConfig.preset("7b")
    assert model_config("7b,layers=16") == TransformerConfig.preset("7b", layers=16)
    sizes = {"dim": 8, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 16, "vocab_size": 32}
    text = ",".join(f"{name}={size}" for name, size in sizes.items())
    assert model_config(text) == TransformerConfig(**sizes)


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 176, "vocab_size": 256,
}  # fmt: skip


def test_a_shape_from_hugging_face_and_from_yaml(tmp_path) -> None:
    pytest.importorskip("transformers")
    plain = TransformerConfig.preset("tiny", layers=2).shape
    assert given_model("tiny,layers=2").shape == plain
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({"model": {"class_path": "any", "init_args": {"config": LLAMA}}}))
    for text in (str(file), str(tmp_path), str(run)):
        shape = given_model(text).shape
        assert shape.each_layer == plain.each_layer
        assert (shape.dim, shape.vocab_size) == (64, 256)
        assert given_model(f"{text},vocab_size=512,num_hidden_layers=1").shape.vocab_size == 512
        with pytest.raises(ValueError, match=r"'vocab_sise'\. Is 'vocab_size' meant"):
            given_model(f"{text},vocab_sise=512")
    (tmp_path / "run.yaml").write_text(json.dumps({"model": {"config": str(tmp_path)}}))
    assert given_model(f"{run},hidden_size=128,head_dim=32").shape.dim == 128


def test_a_yaml_may_hold_a_config_of_the_reference_decoder(tmp_path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("model: {config: {dim: 64, layers: 2}}")
    assert given_model(str(run)).shape == TransformerConfig(layers=2).shape
    run.write_text("model: {config: tiny, learning_rate: 0.1}")
    assert given_model(str(run)).shape == TransformerConfig().shape
    changed = given_model(f"{run},layers=2")
    assert changed.shape == TransformerConfig(layers=2).shape
    assert (changed.file, changed.changes) == (str(run), {"layers": 2})
    assert changed.settings == {"learning_rate": 0.1}
    with pytest.raises(ValueError, match="no option 'lairs'"):
        given_model(f"{run},lairs=2")


@pytest.mark.parametrize("text", ["", "model: tiny", "data: {}", "a: [", "model: {learning: 1}"])
def test_a_yaml_without_a_model_is_refused(tmp_path, text: str) -> None:
    run = tmp_path / "run.yaml"
    with pytest.raises(ValueError, match=r"run.yaml: No such file"):
        given_model(str(run))
    run.write_text(text)
    with pytest.raises(ValueError, match=r"run.yaml has no model with a config"):
        given_model(str(run))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("link", ["[{}]", "{{<<: [{}]}}", "self"])
def test_aliases_that_stand_for_gigabytes_are_refused(tmp_path, link: str) -> None:
    lines = ["a0: &a0 {x: y}"]
    for each in range(1, 12):
        lines.append(f"a{each}: &a{each} {link.format(', '.join([f'*a{each - 1}'] * 9))}")
    if link == "self":
        lines = ["a11: &a11 [*a11]"]
    run = tmp_path / "run.yaml"
    run.write_text("\n".join([*lines, "model: {config: {dim: *a11}}"]))
    with pytest.raises(ValueError, match=r"run\.yaml has .*its aliases stand for too much"):
        given_model(str(run))
    run.write_text("size: &size 2\nmodel: {config: {dim: 64, layers: *size}}")
    assert given_model(str(run)).shape == TransformerConfig(layers=2).shape


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["", "!!int ", "!!float "])
def test_numbers_to_base_60_are_texts(tmp_path, kind: str) -> None:
    """PyYAML takes time in the square of their length."""
    run, number = tmp_path / "run.yaml", "1" + ":1" * 200_000
    run.write_text(f"model: {{config: tiny, learning_rate: {kind}{number}, seed: 1_0}}")
    assert given_model(str(run)).settings == {"learning_rate": number, "seed": 10}


def test_a_yaml_larger_than_any_config_and_an_endless_number_are_refused(tmp_path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(f"model: {{config: tiny, seed: {'1' * 10_000}}}")
    with pytest.raises(ValueError, match=r"run\.yaml has no model .*Exceeds the limit"):
        given_model(str(run))
    run.write_text("model: {config: tiny}\n" + "#" * (1 << 20))
    with pytest.raises(ValueError, match=r"no more than 1,048,576 are read"):
        given_model(str(run))


def test_a_config_that_is_not_there_is_refused(tmp_path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"neither a folder with a config\.json"):
        given_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"neither a folder with a config\.json"):
        given_model(str(tmp_path))


def test_without_transformers_the_command_says_what_to_install(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("lightning_wlb.models.hugging")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = ["--model", str(tmp_path), "--lengths", "generator-a", "--mesh", "1,1,1,1"]
    assert main(["plan", *given, "--context-window", "4096", "--profile", "cpu"]) == 2
    assert "pip install 'lightning-wlb[train]', or [hf]" in capsys.readouterr().err


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
        assert sum(plan.tokens for plan in plans) >= (3 * 2 - 3 / 2) * 4096
        assert lengths.max() <= 4096


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["steps", "micro_batches", "context_window"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_counts_that_are_none_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        load_lengths("generator-a", **(SETTINGS | {name: value}))


def test_stdlib_is_no_file_of_the_working_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib").write_text("1 2 3")
    assert len(load_lengths("stdlib", **SETTINGS)) > 500


def test_text_may_have_words_or_lines_and_arrays_are_numpy_s(tmp_path) -> None:
    text, array = tmp_path / "lengths", tmp_path / "lengths.npy"
    text.write_text("3 1\n4\n\n1 5\n")
    np.save(array, [3, 1, 4, 1, 5])
    for path in (text, array):
        assert load_lengths(str(path), **SETTINGS).tolist() == [3, 1, 4, 1, 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "lengths"),
        ("12\nthree", "lengths"),
        ("1.5 2", "lengths"),
        ("\0", "lengths"),
        (np.ones((2, 2)), r"float64 with shape \(2, 2\)"),
        (np.array([{"a": 1}], dtype=object), "not a list of lengths"),
    ],
)
def test_files_without_lengths_are_refused(tmp_path, content, message: str) -> None:
    path = tmp_path / ("lengths.txt" if isinstance(content, str) else "lengths.npy")
    if isinstance(content, str):
        path.write_text(content)
    else:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(ValueError, match=message) as error:
        load_lengths(str(path), **SETTINGS)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("ending", ["", *STORE_FILES])
def test_folders_and_files_of_documents_are_opened_as_documents(tmp_path, monkeypatch, ending):
    path = tmp_path / f"corpus{ending}"
    if ending:
        path.write_bytes(b"")
    else:
        path.mkdir()
    asked = []

    def opened(given: str) -> InMemoryDocuments:
        asked.append(given)
        return InMemoryDocuments([[1, 2, 3], [4]])

    monkeypatch.setattr("lightning_wlb.data.open_documents.documents", opened)
    assert load_lengths(str(path), **SETTINGS).tolist() == [3, 1]
    assert asked == [str(path)]


def test_documents_of_more_tokens_than_the_model_are_refused_as_training_does(tmp_path) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"tokens": [[0, 1, 2], [3, 4]]}))
    mapping = f"{{path: {path}, vocab_size: 300}}"
    assert load_lengths(mapping, **SETTINGS, vocab_size=300).tolist() == [3, 2]
    with pytest.raises(ValueError, match=r"300 different tokens, .* of 256. .*,vocab_size=300 or"):
        load_lengths(mapping, **SETTINGS, vocab_size=256)


def test_a_mapping_names_documents_and_no_mixture(tmp_path) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"tokens": [[0, 1, 2], [3, 4]]}))
    mapping = f"{{path: {path}}}"
    assert load_lengths(mapping, **SETTINGS).tolist() == [3, 2]
    with pytest.raises(ValueError, match=r"--lengths: a mixture takes its stores .* one by one"):
        load_lengths(f"{{mixture: [{{documents: {mapping}, weight: 1}}]}}", **SETTINGS)
    with pytest.raises(ValueError, match="--lengths: while parsing a flow mapping"):
        load_lengths("{path: a", **SETTINGS)


def test_documents_of_an_unknown_kind_are_a_mistake(tmp_path) -> None:
    with pytest.raises(ValueError, match=f"--lengths: documents='{tmp_path}'"):
        load_lengths(str(tmp_path), **SETTINGS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices-per-node", "0"], "--devices-per-node=0, but it must be at least 1"),
        (["--packing", ""], "--packing='' is not one of"),
        (["--model", "tiny,layers=2,layers=3"], "gives layers twice"),
        (["--micro-batches", "4000000"], "micro_batches=4000000 is more than 1,048,576"),
        (["--context-window", "1000000000000"], "context_window=1000000000000 is more than"),
        (["--mesh", "auto", "--devices", "1000000000000"], "devices=1000000000000 is more than"),
        (["--lengths", "long.npy"], "long.npy has lengths from 1 to 9223372036854775808, but"),
        (["--lengths", "none.npy"], "none.npy has lengths from 0 to 4, but documents have 1 to"),
    ],
)
def test_what_would_be_passed_over_or_never_end_is_refused(
    tmp_path, monkeypatch, capsys, options, said
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("long.npy", np.array([1, 1 << 63], np.uint64))
    np.save("none.npy", np.array([4, 0]))
    np.save("lengths.npy", np.array([100, 200]))
    given = "plan --lengths lengths.npy --model tiny --mesh 1,1,1,1 --context-window 512"
    rest = ["--micro-batches", "2", "--profile", "cpu", "--steps", "1", *options]
    assert main([*given.split(), *rest]) == 2
    assert said in capsys.readouterr().err
