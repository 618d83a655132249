"""docs/families.md from the lists that the tests of this folder hold; run it to write the page."""

from __future__ import annotations

import textwrap
from pathlib import Path

from lightning_wlb.models.huggingface.families import CHECKED

VERSION = "5.23"  # of transformers

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
    checked = "\n".join(textwrap.wrap(", ".join(f"`{name}`" for name in sorted(CHECKED)), 100))
    refused = "\n".join(f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items()))
    return f"""# Hugging Face families

Made by `python -m tests.models.huggingface.families_page`; the tests in
`tests/models/huggingface/` hold every line of it. A family is a
`model_type` of transformers {VERSION}, in a tiny configuration.

## Exact

In float64 the logits of packed rows and the gradients of every parameter equal those of
transformers' own model, run on each document by itself, to 1e-10. The same holds for loss,
gradients and parameters of an AdamW step on two tensor-parallel ranks.

{checked}.

`make test` runs a covering choice; `python -m pytest -m families` all of it.

## Refused

What is known to be silently wrong on packed rows is refused with the reason. Examples:

| Family | What the refusal says |
|---|---|
{refused}

A family that is in neither list runs with a warning.
"""


if __name__ == "__main__":
    Path("docs/families.md").write_text(page(), encoding="utf-8")
