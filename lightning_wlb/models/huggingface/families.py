"""Which families of transformers have been checked, and how: tests/models/huggingface says so.

A family is a ``model_type``. Others may work as well: what is known to be wrong is refused by what
the config or the modules say (:mod:`.huggingface.checks`), and a family that is not listed gives a warning.
docs/families.md is made from these lists.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

VERSION = "5.23"
"""Of transformers."""

_CHECKED = """
afmoe apertus arcee aria_text axk1 beam cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3
dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text
gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt_neox gpt_oss granite granite_swa helium
hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama mellum mimo_v2_flash
minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral olmo olmo2 olmo3 phi
phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
"""
TENSOR_PARALLEL = frozenset(_CHECKED.split())
"""Exact on packed rows, and under tensor parallelism."""

ONE_RANK: frozenset[str] = frozenset()
"""Exact on packed rows; no plan for tensor parallelism, or one that cannot be followed."""

EXACT = TENSOR_PARALLEL | ONE_RANK
"""Logits and gradients of packed rows equal those of the documents by themselves."""

REFUSED: dict[str, str] = {
    "deepseek_v32": "layers of type indexed_attention",
    "doge": "a mask of its own",
    "gpt2": "base_model_pp_plan",
    "minimax": "layers of type linear_attention",
    "qwen3_next": "layers of type linear_attention",
}
"""Examples of what is refused, and the words of the refusal."""


def page() -> str:
    """docs/families.md."""
    refused = "\n".join(f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items()))
    return f"""# Hugging Face families

Made by `python -m lightning_wlb.models.huggingface.families`; the tests in
`tests/models/huggingface/` hold every line of it. A family is a
`model_type` of transformers {VERSION}, in a tiny configuration.

## Exact

In float64 the logits of packed rows and the gradients of every parameter equal those of
transformers' own model, run on each document by itself, to 1e-10. The same holds for loss,
gradients and parameters of an AdamW step on two tensor-parallel ranks.

{_listed(TENSOR_PARALLEL)}.
{_on_one_rank()}
`make test` runs a covering choice; `python -m pytest -m families` all of it.

## Refused

What is known to be silently wrong on packed rows is refused with the reason. Examples:

| Family | What the refusal says |
|---|---|
{refused}

A family that is in neither list runs with a warning.
"""


def _on_one_rank() -> str:
    if not ONE_RANK:
        return ""
    return f"\nExact likewise, without tensor parallelism: {_listed(ONE_RANK)}.\n"


def _listed(names: frozenset[str]) -> str:
    return "\n".join(textwrap.wrap(", ".join(f"`{name}`" for name in sorted(names)), 100))


if __name__ == "__main__":
    Path("docs/families.md").write_text(page(), encoding="utf-8")
