"""Weights from a folder: every value in its place, and nothing read that a rank does not hold.

From a folder into a decoder and out again: the same files, for every family.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from lightning_wlb.models.huggingface import load_and_export
from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.families import CHECKED
from lightning_wlb.models.huggingface.huggingface_module import HuggingFaceModule
from lightning_wlb.models.huggingface.load_and_export import files_beside, write_model
from lightning_wlb.models.huggingface.recurrent import FAMILIES as RECURRENT
from lightning_wlb.models.huggingface.safetensors_folder import Folder
from lightning_wlb.models.tensor_parallel import held, share_of
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.models.huggingface.configs import tiny
from tests.models.huggingface.folders import write
from tests.ranks import run_ranks
from tests.strategy.harness import Case, data, trainer

# Dense; tied; experts stored one by one, under two names; a persistent buffer; packed; biases.
FAMILIES = ("llama", "gemma3_text", "mixtral", "qwen2_moe", "deepseek_v3", "phi3", "gpt_oss")


def parts(decoder: HuggingFaceDecoder) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Parameters and persistent buffers: family's name, whole tensor, what is held of it."""
    for name, parameter in decoder.named_parameters():
        source = decoder.family_name(decoder.tied.get(name, name))
        yield source, parameter, held(parameter.detach())
    for name, buffer in decoder.persistent_buffers():
        yield decoder.family_name(name), buffer, buffer


def wrong(decoder: HuggingFaceDecoder, state: dict[str, Tensor]) -> list[str]:
    """Names of what the decoder holds and does not equal the model's."""
    return [
        name
        for name, whole, own in parts(decoder)
        if not torch.equal(own, state[name].reshape(whole.shape)[share_of(whole)])
    ]


def load(decoder: HuggingFaceDecoder, folder: str | Path) -> None:
    load_and_export.load(decoder, load_and_export.open_weights(decoder.config, folder))


def emptied(config: Any) -> HuggingFaceDecoder:
    """A decoder without a right value."""
    decoder = HuggingFaceDecoder(config)
    with torch.no_grad():
        for _, _, own in parts(decoder):
            own.fill_(torch.nan)
    return decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_reads_every_value(family, tmp_path):
    config = tiny(family)
    # So small that there are many files, and an index.
    model = write(tmp_path, config, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    decoder = emptied(config)
    load(decoder, tmp_path)
    assert wrong(decoder, model.state_dict()) == []


class Loading(HuggingFaceModule):
    """Reads weights, and counts."""

    def init_weights(self) -> None:
        read = Folder.read
        self.bytes = 0

        def counted(folder: Folder, *args: Any) -> Tensor:
            values = read(folder, *args)
            self.bytes += values.numel() * values.element_size()
            return values

        with patch.object(Folder, "read", counted):
            load(self.model, self.pretrained)
        state = torch.load(Path(self.pretrained) / "state.pt")
        self.wrong = wrong(self.model, state)
        self.share = sum(own.numel() * own.element_size() for _, _, own in parts(self.model))


# Experts, packed projections, a persistent buffer, tied ends; each split in another way.
LOADED = [
    ("mixtral", (2, 1, 1, 2)),
    ("phi3", (2, 1, 1, 2)),
    ("deepseek_v3", (2, 1, 1, 2)),
    ("gemma3_text", (1, 2, 2, 1)),
    ("deepseek_v3", (1, 2, 2, 1)),
    ("phi3", (4, 1, 1, 1)),
]


def on_ranks(rank: int, folders: Path) -> list[tuple[Any, ...]]:
    results = []
    for family, mesh in LOADED:
        module = Loading(str(folders / family), pretrained=True)
        runner = trainer(WLBStrategy(*mesh), 4, precision="32-true", limit_train_batches=0)
        runner.fit(module, data(Case()))
        results.append((module.wrong, module.bytes, module.share))
    return results


def test_ranks_read_their_own_shares_and_no_more(tmp_path):
    for family in {family for family, _ in LOADED}:
        model = write(tmp_path / family, tiny(family))
        torch.save(model.state_dict(), tmp_path / family / "state.pt")
    for rank in run_ranks(on_ranks, 4, tmp_path, process_group=False):
        for case, (differing, read, share) in zip(LOADED, rank, strict=True):
            assert differing == [], case
            assert read == share, case


def rewritten(folder: Path, change: Any) -> None:
    """The folder with its tensors changed."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), "missing: model.norm.weight"),
        (
            lambda state: state.update({"model.layers.4.mlp.up_proj.weight": torch.zeros(48, 32)}),
            "not in the model: model.layers.4.mlp.up_proj.weight",
        ),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(16)}),
            r"of another shape: model.norm.weight is \(16,\), in the model \(32,\)",
        ),
        # Codes, which would be taken for values.
        (
            lambda state: state.update(
                {"model.layers.0.mlp.up_proj.weight": torch.ones(48, 32, dtype=torch.int8)}
            ),
            "is quantised: model.layers.0.mlp.up_proj.weight is I8",
        ),
    ],
)
def test_a_folder_of_another_model_is_refused(change, message, tmp_path):
    write(tmp_path, tiny("llama"))
    rewritten(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load(emptied(tiny("llama")), tmp_path)


def test_tables_that_modules_compute_are_passed_over(tmp_path):
    model = write(tmp_path, tiny("llama"))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewritten(tmp_path, lambda state: state.update({name: torch.ones(4)}))
    decoder = emptied(tiny("llama"))
    load(decoder, tmp_path)
    assert wrong(decoder, model.state_dict()) == []


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    config = tiny("gemma3_text")
    write(tmp_path, config)
    own = "model.embed_tokens.weight"
    rewritten(tmp_path, lambda state: state.update({"lm_head.weight": state[own].clone()}))
    load(emptied(config), tmp_path)
    rewritten(tmp_path, lambda state: state.update({"lm_head.weight": state[own] + 1}))
    with pytest.raises(ValueError, match="tie_word_embeddings=False"):
        load(emptied(config), tmp_path)


def test_folders_without_safetensors_are_refused(tmp_path):
    decoder = emptied(tiny("llama"))
    with pytest.raises(ValueError, match=r"has neither"):
        load(decoder, tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"only pytorch_model.bin.*save_pretrained"):
        load(decoder, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        load(decoder, tmp_path)
    (tmp_path / "model.safetensors").unlink()  # which is read before an index
    index = {"weight_map": {"model.norm.weight": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"gone.safetensors cannot be read"):
        load(decoder, tmp_path)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def check_round_trip(family: str, folder: Path) -> None:
    config = tiny(family)
    model, decoder, out = write(folder, config), emptied(config), folder / "out"
    load(decoder, folder)
    assert wrong(decoder, model.state_dict()) == []
    values = dict(decoder.named_parameters()) | dict(decoder.persistent_buffers())
    out.mkdir()
    steps = []
    count = write_model(
        lambda names: {name: values[name].detach() for name in names},
        config,
        out,
        dtype=torch.float32,
        report=lambda done, of: steps.append((done, of)),
    )
    before, after = stored(folder), stored(out)
    assert count == len(before)
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
    # Each layer and the two ends.
    groups = len(decoder.layers) + 2
    assert steps == [(done, groups) for done in range(1, groups + 1)]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next", "granitemoehybrid"])
def test_what_is_read_comes_out_again(family, tmp_path):
    check_round_trip(family, tmp_path)


@pytest.mark.families
@pytest.mark.parametrize("family", sorted(CHECKED | RECURRENT.keys()))
def test_what_is_read_comes_out_again_for_every_family(family, tmp_path):
    check_round_trip(family, tmp_path)


def test_the_tokenizers_files_are_known_by_their_names(tmp_path):
    tokenizer = (
        "tokenizer.json",
        "spiece.model",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    )
    for name in (*tokenizer, "generation_config.json", "config.json", "model.safetensors", "x.md"):
        (tmp_path / name).touch()
    (tmp_path / "tokenizers").mkdir()
    assert files_beside(tmp_path) == sorted([*tokenizer, "generation_config.json"])
