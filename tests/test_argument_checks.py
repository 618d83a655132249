"""What a user passes: numbers of any library become Python's, everything else is answered."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb import (
    ImbalanceMonitor,
    LanguageModule,
    TransformerConfig,
    WLBDataModule,
    WLBStrategy,
)
from lightning_wlb.argument_checks import choice, flag, number, whole, wholes
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.data.stores.python_stdlib import StdlibDocuments
from lightning_wlb.mesh import Mesh

INTEGERS = (int, np.int64, np.uint8, np.int32, torch.tensor)


@given(st.sampled_from(INTEGERS), st.integers(0, 255), st.integers(0, 255))
def test_whole_numbers_of_any_library_are_pythons(kind: Any, value: int, least: int) -> None:
    if value >= least:
        assert type(whole("n", kind(value), least)) is int
        assert whole("n", kind(value), least) == value
        assert wholes("n", np.array([value, value])) == (value, value)
    else:
        with pytest.raises(ValueError, match=f"n=.*, but it must be at least {least}. Give"):
            whole("n", kind(value), least)


@pytest.mark.parametrize("value", [True, np.True_, 32.0, np.float32(1), "3", None, [3], 1j])
def test_nothing_else_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^n=.* is of type \w+. Give a whole number.$"):
        whole("n", value)
    with pytest.raises(ValueError, match=r"Give a sequence of whole numbers|Give a whole number"):
        wholes("n", value if value != [3] else [[3]])


@given(st.floats(), st.floats(-10, 10), st.floats(-10, 10), st.booleans())
def test_numbers_are_finite_and_within_bounds(
    value: float, low: float, high: float, above: bool
) -> None:
    fits = low <= value <= high and not (above and value == low)
    if fits:
        assert number("x", np.float64(value), low, high, above) == value
    else:
        with pytest.raises(ValueError, match=r"x=.* is out of range. Give a number"):
            number("x", value, low, high, above)


@pytest.mark.parametrize("value", [True, np.False_, "0.1", b"1", None, [1.0]])
def test_nothing_else_is_a_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"x=.* is of type \w+. Give a number from 0.$"):
        number("x", value, 0)


def test_flags_and_choices() -> None:
    assert flag("f", np.True_) is True
    for value in (1, "false", None):
        with pytest.raises(ValueError, match=r"f=.* Give True or False"):
            flag("f", value)
    assert choice("c", "b", ["a", "b"]) == "b"
    for other in ("d", ["a"], None, 1):
        with pytest.raises(ValueError, match=r"c=.* is not one of a, b. Choose one of these."):
            choice("c", other, ["a", "b"])


def data(**options: Any) -> WLBDataModule:
    return WLBDataModule([[1, 2]], **({"context_window": 32, "micro_batches": 2} | options))


def config(**options: Any) -> TransformerConfig:
    return TransformerConfig.preset("tiny", **options)


def model(config: Any = None, **options: Any) -> LanguageModule:
    return LanguageModule(config, **options)


def documents(**options: Any) -> InMemoryDocuments:
    return InMemoryDocuments([[1, 2]], **options)


def wlb(**options: Any) -> dict[str, Any]:
    return {"packing": {"method": "wlb", **options}}


BAD: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (data, {"context_window": 32.5}, "context_window=32.5 is of type float"),
    (data, {"context_window": "32"}, "context_window='32' is of type str"),
    (data, {"micro_batches": True}, "micro_batches=True is of type bool"),
    (data, {"packing": None}, "packing=None is not one of"),
    (data, {"sharding": "per_page"}, "sharding='per_page' is not one of adaptive, "),
    (data, {"cap": 40.5}, "cap=40.5 is of type float"),
    (data, wlb(queues=1.5), "queues=1.5"),
    (data, {"seed": 0.5}, "seed=0.5"),
    (data, {"shuffle": "false"}, "shuffle='false' is of type str. Give True or False"),
    (data, {"max_tokens": 1e9}, "max_tokens=1000000000.0 is of type float"),
    (data, {"num_workers": -1}, "num_workers=-1, but it must be at least 0"),
    (data, {"validation_documents": True}, "validation_documents=True is of type bool"),
    (data, {"validation_documents": -1}, "validation_documents=-1, but it must be at least 0"),
    (data, {"validation_documents": 0.1}, "validation_documents=0.1 is of type float"),
    (data, {"validation_documents": "wiki"}, "validation_documents='wiki': wiki is no"),
    (data, {"test_documents": 0.1}, "test_documents=0.1 is of type float"),
    (WLBDataModule, {"documents": "wiki", "context_window": 8, "micro_batches": 1}, "'stdlib'"),
    (WLBDataModule, {"documents": 3, "context_window": 8, "micro_batches": 1}, "documents of type"),
    (
        model,
        {"config": {"dims": 3}},
        "TransformerConfig has no option 'dims'. It takes dim, layers",
    ),
    (model, {"config": "8c"}, "'8c' is none of the presets tiny"),
    (model, {"config": 3}, "config=3 is of type int. Give a TransformerConfig"),
    (model, {"learning_rate": "3e-4"}, "learning_rate='3e-4' is of type str"),
    (model, {"learning_rate": -1}, "learning_rate=-1 is out of range"),
    (model, {"weight_decay": True}, "weight_decay=True"),
    (model, {"betas": 0.9}, "betas=0.9. Give two numbers"),
    (model, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\). Give two numbers"),
    (model, {"warmup_tokens": 1.5}, "warmup_tokens=1.5"),
    (model, {"warmup_tokens": 5, "decay_tokens": 5}, "Give 0 <= warmup_tokens < decay_tokens"),
    (model, {"min_learning_rate_ratio": 2}, "min_learning_rate_ratio=2 .* from 0 to 1"),
    (model, {"loss_normalisation": "mean"}, "loss_normalisation='mean' is not one of step"),
    (
        model,
        {"activation_checkpointing": "some"},
        "'some' is not one of auto, none, selective, full",
    ),
    (model, {"activation_checkpointing": True}, "activation_checkpointing=True is not one of"),
    (model, {"attention_backend": "flex"}, "attention_backend='flex' is not one of auto, cpu"),
    (model, {"seed": -1}, "seed=-1, but it must be at least 0"),
    (config, {"dim": 64.0}, "TransformerConfig: dim=64.0 is of type float"),
    (config, {"layers": 0}, "TransformerConfig: layers=0, but it must be at least 1"),
    (config, {"heads": "4"}, "TransformerConfig: heads='4'"),
    (config, {"rope_theta": 0}, "TransformerConfig: rope_theta=0 is out of range"),
    (config, {"norm_eps": "1e-5"}, "TransformerConfig: norm_eps='1e-5' is of type str"),
    (config, {"tied_embeddings": "no"}, "TransformerConfig: tied_embeddings='no'"),
    (documents, {"vocab_size": 3.5}, "vocab_size=3.5 is of type float"),
    (StdlibDocuments, {"tokenizer": "words"}, "tokenizer='words' is not one of bytes, bpe"),
    (StdlibDocuments, {"tokenizer": "bpe", "vocab_size": 300.5}, "vocab_size=300.5"),
    (WLBStrategy, {"data_parallel_size": 1.5}, "data_parallel_size=1.5 is of type float. Give"),
    (WLBStrategy, {"tensor_parallel_size": True}, "tensor_parallel_size=True is of type bool"),
    (
        WLBStrategy,
        {"context_parallel_size": 0},
        "context_parallel_size=0, but it must",
    ),
    (WLBStrategy, {"pipeline_parallel_size": "2"}, "pipeline_parallel_size='2' is of type str"),
    (WLBStrategy, {"schedule": "zb"}, "schedule='zb' is not one of 1f1b"),
    (WLBStrategy, {"schedule": ["1f1b"]}, "is not one of 1f1b"),
    (WLBStrategy, {"virtual_pipeline_size": 1.5}, "virtual_pipeline_size=1.5 is of type float"),
    (
        WLBStrategy,
        {"schedule": "1f1b", "virtual_pipeline_size": 2},
        "use 'interleaved'",
    ),
    (WLBStrategy, {"process_group_backend": "glo"}, "process_group_backend='glo' .* Give one of"),
    (WLBStrategy, {"timeout": 60}, "timeout=60 is no time. Give a datetime.timedelta"),
    (WLBStrategy, {"timeout": timedelta(0)}, "is no time. Give"),
    (ImbalanceMonitor, {"warm_up_steps": 1.5}, "warm_up_steps=1.5"),
    (ImbalanceMonitor, {"heat_map": 1}, "heat_map=1 is of type int. Give True or False"),
    (ImbalanceMonitor, {"profile": "v100"}, "'v100' is neither shipped"),
    (Mesh, {"data": 1.0}, "mesh: data=1.0 is of type float"),
]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    BAD,
    ids=lambda value: getattr(value, "__name__", str(value))[:40],  # the same in every process
)
def test_a_mistake_is_answered_where_it_is_made(
    make: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match=message) as info:
        make(**options)
    assert "\n" not in str(info.value)
    assert re.search(
        r"\b(give|choose|use|raise|it takes|the presets|shipped|pass)\b", str(info.value), re.I
    )


def test_numbers_of_numpy_are_taken_and_become_pythons() -> None:
    """Else they would be in checkpoints, which are of plain types."""
    five = np.int64(5)
    settings = data(context_window=five, max_tokens=five, **wlb(queues=np.int64(3))).settings
    assert [type(each) for each in (settings.context_window, settings.max_tokens)] == [int, int]
    assert type(settings.packing_choice.options.queues) is int
    assert type(data(validation_documents=np.int32(1)).validation_documents) is int
    shape = config(dim=np.int64(64), norm_eps=np.float32(1e-6))
    assert (type(shape.dim), type(shape.norm_eps)) == (int, float)
    assert type(ModelShape(*[five] * 7).dim) is int
    module = model(shape, learning_rate=np.float64(0.1), warmup_tokens=five)
    for value in module.hparams.values():
        assert not isinstance(value, np.generic), module.hparams
    strategy = WLBStrategy(np.int64(2), pipeline_parallel_size=five)
    assert repr(strategy).startswith("WLBStrategy(2, 5, 'auto', 'auto')")
