"""Folders of models and tokenizers: which names mean one here."""

from pathlib import Path

import pytest

from lightning_wlb.data.tokenising.texts import hugging_face_tokenizer, tokenizer_file
from lightning_wlb.model_folder_checks import is_here
from lightning_wlb.models.huggingface.config_and_shape import read_config
from lightning_wlb.models.huggingface.huggingface_module import HuggingFaceModule
from lightning_wlb.models.huggingface.safetensors_folder import resolve
from tests.models.huggingface.configs import tiny


def test_a_name_on_the_hub_is_no_folder_that_another_user_has_put_here(scratch, monkeypatch):
    monkeypatch.chdir(scratch)
    (scratch / "mine").mkdir()
    assert is_here("mine")
    assert not is_here("org/name")
    for trusted in ("./theirs", Path("theirs"), str(scratch / "theirs"), "../scratch/theirs"):
        assert is_here(trusted)
    said = rf"{scratch}/(theirs|leads) here. Write ./(theirs|leads/in) if you trust that"
    readers = is_here, tokenizer_file, hugging_face_tokenizer, read_config, resolve
    for opens in (*readers, lambda name: HuggingFaceModule(tiny("llama"), pretrained=name)):
        for name in ("theirs", "leads/in"):
            with pytest.raises(ValueError, match=said):
                opens(name)
