"""Folders of models and tokenizers: which names mean one here."""

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from lightning_wlb.data.tokenising.texts import TextEncoder, hugging_face_tokenizer, tokenizer_file
from lightning_wlb.model_folder_checks import check_model, is_here
from lightning_wlb.models.huggingface.config_and_shape import read_config
from lightning_wlb.models.huggingface.huggingface_module import HuggingFaceModule
from lightning_wlb.models.huggingface.safetensors_folder import resolve
from tests.data.tokenising.support import saved
from tests.models.huggingface.configs import tiny


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


def test_no_stranger_adds_a_file_to_a_folder_of_ones_own(scratch):
    (scratch / "leads").unlink()
    (scratch / "theirs").rename(scratch / "../theirs")
    check_model(scratch)
    (scratch / "chat_template.jinja").touch()
    os.chown(scratch / "chat_template.jinja", 65534, 65534)
    with pytest.raises(ValueError, match=r"template\.jinja is another user's, where others may"):
        check_model(scratch)
    (scratch / "../theirs/chat_template.jinja").touch()
    os.chown(scratch / "../theirs/chat_template.jinja", 65534, 65534)
    check_model(scratch / "../theirs")  # a colleague's folder


def test_a_folder_that_comes_while_a_name_is_opened_is_not_taken(scratch, monkeypatch):
    monkeypatch.chdir(scratch)

    def opened(*_: Any, **__: Any) -> Any:
        (scratch / "late").mkdir()
        os.chown(scratch / "late", 65534, 65534)
        return tiny("llama")

    fields = tiny("llama").to_dict()
    monkeypatch.setattr(PretrainedConfig, "get_config_dict", lambda *_, **__: (fields, {}))
    monkeypatch.setattr(AutoConfig, "from_pretrained", opened)
    with pytest.raises(ValueError, match="late may mean a name on the hub, but another user"):
        read_config("late")


def test_a_colleagues_folder_to_work_in_is_nobodys_attack(scratch, monkeypatch):
    (scratch / "theirs/tokenizer.json").touch()
    monkeypatch.chdir(scratch / "theirs")
    assert is_here("tokenizer.json")


def test_no_stranger_names_the_token_that_ends_documents(scratch):
    file = Path(saved(scratch))
    TextEncoder(str(file), "text", True)
    beside = scratch / "tokenizer_config.json"
    beside.write_text('{"eos_token": "the"}')
    os.chown(beside, 65534, 65534)
    with pytest.raises(ValueError, match=f"{beside} is another user's, where others may put files"):
        TextEncoder(str(file), "text", True)
