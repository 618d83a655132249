"""docs/families.md from the lists that the tests of this folder hold; run it to write the page."""

from __future__ import annotations

import textwrap
from pathlib import Path

from lightning_wlb.models.huggingface.families import CHECKED
from lightning_wlb.models.huggingface.recurrent import FAMILIES

VERSION = "5.23"  # of transformers

REFUSED: dict[str, str] = {
    "deepseek_v32": "layers of type indexed_attention",
    "doge": "a mask of its own",
    "gpt2": "base_model_pp_plan",
    "minimax": "layers of type linear_attention",
    "jamba": "layers of type linear_attention",
}
"""Examples of what is refused, and the words of the refusal."""

KINDS = {
    "": "short convolution",
    "chunk_kimi_delta_attention": "Kimi's delta attention",
    "mamba2_chunk_scan": "Mamba 2",
    "torch_chunk_gated_delta_rule": "gated delta rule",
}
"""The functions that a recurrent layer calls beside the convolution."""


def page() -> str:
    """docs/families.md."""
    checked = "\n".join(textwrap.wrap(", ".join(f"`{name}`" for name in sorted(CHECKED)), 100))
    of_kind: dict[str, list[str]] = {}
    for name, functions in sorted(FAMILIES.items()):
        of_kind.setdefault(KINDS[max(functions - {"causal_conv1d_fn"}, default="")], []).append(
            name
        )
    recurrent = "\n".join(
        f"| {kind} | {', '.join(f'`{name}`' for name in names)} |"
        for kind, names in of_kind.items()
    )
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

## Exact, with recurrent layers

Linear attention, Mamba 2 and short convolutions begin anew with every document. The same as above
holds for three AdamW steps on data, pipeline, context and tensor parallel ranks (`lfm3` has no plan
for the last), for whole and sliced documents, for micro-batches that replicas share, with every
recomputation, and for a run that resumes on another mesh. Only transformers' own functions in plain
torch have run, which are slow and hold much memory. `flash-linear-attention`, `causal-conv1d` and
`mamba-ssm` are called where they are installed, once for each document; that has not been run.

| Recurrence | Families |
|---|---|
{recurrent}

Mixtures among both lists train without their load-balancing losses.

## Tensor-parallel messages

A block (attention, a feed-forward network) gathers rows and adds up its output, in forward and in
backward. Its modules are transformers' own, so that the first three of these four messages are
waited for. In backward the last, the sum of the rows' gradients, travels while the gradients of
weights of the block's linear layers are computed: in every family above, with adapters too, and
with `WLBStrategy(overlap="auto")`, the default. Matrices that are no `nn.Linear`, as those of
experts, have their gradients before it.

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
