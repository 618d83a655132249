"""Promise 1 for Hugging Face models: two AdamW steps on a mesh equal transformers by itself.

The reference runs transformers' own model with its eager attention, one document at a time, in one
process. A covering choice runs always, every family on every mesh under the marker ``families``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from lightning_wlb.models.huggingface.families import CHECKED
from tests.models.huggingface.support import Run, by_document, on_ranks, worst_error
from tests.ranks import run_ranks

TOLERANCE = 1e-10
SLICED = {"packing": "slim"}
CUT = {"packing": "original"}

# Transformers' own defaults scale by 1.
GRANITE = (("embedding_multiplier", 12.0), ("logits_scaling", 8.0), ("residual_multiplier", 0.22))

# Runs of one launch have equally many ranks.
CHOICE = {
    "two ranks": (
        Run("deepseek_v3", (1, 1, 1, 2)),
        Run("qwen2_moe", (1, 1, 1, 2), checkpointing="full"),
        Run("phi3", (1, 1, 1, 2)),  # projections whose columns are gathered
        # Scales its embedding in front of the first layer, which a second stage must not repeat.
        Run("granite", (1, 2, 1, 1), checkpointing="selective", fields=GRANITE),
        Run("gpt_oss", (1, 1, 2, 1), **CUT),
        # The embedding gives a padding token, here a word of the second rank, no gradient.
        Run("llama", (1, 1, 1, 2), fields=(("pad_token_id", 41),)),
    ),
    "four ranks": (
        # Two key/value heads; norms of queries and keys with a row for each head.
        Run("cohere", (1, 1, 1, 4), fields=(("use_qk_norm", True),)),
        Run("gpt_oss", (1, 2, 1, 2)),
        Run("gemma2", (1, 2, 2, 1), **SLICED),
        Run("deepseek_v3", (1, 2, 2, 1), schedule="interleaved", virtual=2),
    ),
}

FAMILIES = (
    "llama",
    "qwen3",
    "gemma3_text",
    "phi3",
    "gpt_oss",
    "qwen2_moe",
    "deepseek_v3",
    "axk1",
)
MESHES = ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 1, 4), (1, 2, 2, 2))
MIXTURES: tuple[dict[str, Any], ...] = (
    {"mesh": (1, 2, 2, 1), **SLICED},
    {"mesh": (1, 2, 1, 1), "schedule": "interleaved", "virtual": 2},
    {"mesh": (1, 1, 2, 1), **CUT},
    {"mesh": (1, 1, 2, 2), "checkpointing": "full"},
)


@cache
def expected(run: Run) -> dict[str, Any]:
    return by_document(run)


def _of_documents(run: Run) -> dict[str, Any]:
    """What the reference computes depends on: the documents and the packing, not the mesh."""
    names = ("packing", "steps", "learning_rate", "fields")
    return {name: getattr(run, name) for name in names}


def check(runs: tuple[Run, ...]) -> None:
    ranks = int(np.prod(runs[0].mesh))
    records = run_ranks(on_ranks, ranks, runs, process_group=False)
    for number, run in enumerate(runs):
        wanted = expected(replace(Run(run.family), **_of_documents(run)))
        error = worst_error([each[number] for each in records], wanted)
        assert error < TOLERANCE, (run, error)


@pytest.mark.parametrize("name", CHOICE)
def test_a_choice_of_families_and_meshes(name):
    check(CHOICE[name])


@pytest.mark.families
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_families_on_meshes(family, mesh):
    check((Run(family, mesh),))


@pytest.mark.families
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda each: "-".join(map(str, each)))
def test_families_sliced_interleaved_cut_and_recomputed(family, mixture):
    check((replace(Run(family), **mixture),))


@pytest.mark.families
@pytest.mark.parametrize("family", sorted(CHECKED - set(FAMILIES)))
def test_the_other_families_under_tensor_parallelism(family):
    # Adam makes of a gradient that is zero but for rounding a step of its full size.
    check((Run(family, (1, 1, 1, 2), steps=1),))
