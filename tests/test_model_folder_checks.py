"""Folders of models and tokenizers: which names mean one here."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import IncompleteSnapshotError
from transformers import PretrainedConfig

from lightning_wlb import model_folder_checks
from lightning_wlb.data.tokenising.texts import TextEncoder, hugging_face_tokenizer, tokenizer_file
from lightning_wlb.model_folder_checks import check_beside, check_counts, check_model, is_here
from lightning_wlb.models.huggingface.config_and_shape import read_config
from lightning_wlb.models.huggingface.huggingface_module import HuggingFaceModule
from lightning_wlb.models.huggingface.safetensors_folder import resolve
from tests.data.tokenising.support import saved
from tests.models.huggingface.configs import tiny


@pytest.mark.timeout(60)
def test_fields_with_long_names_take_no_time() -> None:
    """It was the square of the length, where a newline ends the name: 27 seconds for a fifth."""
    for name in ("num_" * 100_000 + "\n", "num_param" * 40_000 + "\n", "n_" * 200_000 + "\n"):
        model_folder_checks._COUNTS.fullmatch(name)
    with pytest.raises(ValueError, match="more than"):
        check_counts({"num_layers\n": 10**9})
    for name in ("x" * 1001, "num_" * 1000):  # matched anew for each number of a list
        with pytest.raises(ValueError, match=r"a field named .* take it out"):
            check_counts({name: [1]})


def test_a_name_on_the_hub_is_no_folder_that_another_user_has_put_here(scratch, monkeypatch):
    monkeypatch.chdir(scratch)
    (scratch / "mine").mkdir()
    assert is_here("mine")
    assert not is_here("org/name")
    for trusted in ("./theirs", Path("theirs"), str(scratch / "theirs"), "../scratch/theirs"):
        assert is_here(trusted)
    (scratch / "dangling").symlink_to("nowhere")
    os.lchown(scratch / "dangling", 65534, 65534)
    with pytest.raises(ValueError, match="another user has put"):
        is_here("dangling")
    said = rf"{scratch}/(theirs|leads) here. Write ./(theirs|leads/in) if you trust that"
    readers = is_here, tokenizer_file, hugging_face_tokenizer, read_config, resolve
    for opens in (*readers, lambda name: HuggingFaceModule(tiny("llama"), pretrained=name)):
        for name in ("theirs", "leads/in"):
            with pytest.raises(ValueError, match=said):
                opens(name)


def test_a_copy_of_the_hub_without_some_files_is_refused(tmp_path, monkeypatch):
    """As a download that broke off leaves it, without the end token or the newer template."""

    def fetch(*_: Any, ignore_patterns: list[str], **__: Any) -> str:
        # Else a copy would need them, and the second is as large as the model.
        assert {"LICENSE*", "consolidated*"} < {*ignore_patterns}
        raise IncompleteSnapshotError("some files are missing", str(tmp_path))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(ValueError, match=f"only a part: fetch the rest, or .*{tmp_path}"):
        model_folder_checks.hub_copy("org/name")


def test_no_stranger_adds_a_file_to_a_folder_of_ones_own(scratch):
    (scratch / "leads").unlink()
    (scratch / "theirs").rename(scratch / "../theirs")
    (scratch / "empty").mkdir()
    os.chown(scratch / "empty", 65534, 65534)  # which nobody reads
    check_model(scratch)
    for name in ("chat_template.jinja", "other.json", "mine.json"):
        (scratch / name).touch()
    os.chown(scratch / "other.json", 65534, 65534)
    os.chown(scratch / "chat_template.jinja", 65534, 65534)
    with pytest.raises(ValueError, match=r"template\.jinja is another user's, where others may"):
        check_model(scratch)
    (scratch / "../theirs/chat_template.jinja").touch()
    os.chown(scratch / "../theirs/chat_template.jinja", 65534, 65534)
    check_model(scratch / "../theirs")  # a colleague's folder
    check_model(scratch / "chat_template.jinja")  # which was named
    with pytest.raises(ValueError, match=r"other\.json is another user's"):
        check_beside(scratch / "mine.json", scratch / "other.json")


def test_a_folder_that_comes_while_a_name_is_opened_is_not_taken(scratch, monkeypatch):
    """Here it comes between two looks, and is gone before the next."""
    monkeypatch.chdir(scratch)
    (scratch / "theirs").rename(scratch / "away")
    hub = scratch / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(model_folder_checks, "hub_is_out_of_reach", lambda: True)
    snapshot = hub / "models--theirs" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "../../refs").mkdir()
    (snapshot / "../../refs/main").write_text("0" * 40)
    for folder, size in ((snapshot, 3), (scratch / "away", 1)):
        Path(saved(folder)).replace(folder / "tokenizer.json")
        fields = {"model_max_length": size, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))
        tiny("llama", num_hidden_layers=size).save_pretrained(folder)
    opens = PretrainedConfig.get_config_dict.__func__

    def raced(*given: Any, **options: Any) -> Any:
        (scratch / "away").rename(scratch / "theirs")
        try:
            return opens(*given, **options)
        finally:
            (scratch / "theirs").rename(scratch / "away")

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", classmethod(raced))
    assert hugging_face_tokenizer("theirs").model_max_length == 3
    assert read_config("theirs").num_hidden_layers == 3


def test_a_colleagues_folder_to_work_in_is_nobodys_attack(scratch, monkeypatch):
    (scratch / "theirs/tokenizer.json").touch()
    monkeypatch.chdir(scratch / "theirs")
    assert is_here("tokenizer.json")


def test_no_stranger_exchanges_the_tokenizer_of_a_folder(scratch):
    file = Path(saved(scratch)).rename(scratch / "tokenizer.json")
    TextEncoder(str(scratch), "text", False)
    os.chown(file, 65534, 65534)
    with pytest.raises(ValueError, match=r"tokenizer\.json is another user's, where others may"):
        TextEncoder(str(scratch), "text", False)
    TextEncoder(str(file), "text", False)  # which was named


def test_no_stranger_names_the_token_that_ends_documents(scratch):
    file = Path(saved(scratch))
    TextEncoder(str(file), "text", True)
    beside = scratch / "tokenizer_config.json"
    beside.write_text('{"eos_token": "the"}')
    os.chown(beside, 65534, 65534)
    with pytest.raises(ValueError, match=f"{beside} is another user's, where others may put files"):
        TextEncoder(str(file), "text", True)


def test_the_hub_is_out_of_reach_where_its_name_is_not_known(monkeypatch) -> None:
    asked = []

    def unknown(host: str, port: object) -> None:
        asked.append(host)
        raise OSError("Name or service not known")

    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub")
    model_folder_checks.hub_is_out_of_reach.cache_clear()
    try:
        assert model_folder_checks.hub_is_out_of_reach()
        assert asked == ["mirror.example"]
        model_folder_checks.hub_is_out_of_reach.cache_clear()
        monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
        assert not model_folder_checks.hub_is_out_of_reach()
    finally:
        model_folder_checks.hub_is_out_of_reach.cache_clear()
