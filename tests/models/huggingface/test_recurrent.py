"""Recurrent layers on packed rows: no document depends on its neighbours, whatever runs where."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.attention.recurrence import RecurrentRows, Segment
from lightning_wlb.cost.shape import Recurrence
from lightning_wlb.models.huggingface import recurrent, recurrent_functions
from lightning_wlb.models.huggingface.config_and_shape import shape_of
from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.recurrent import FAMILIES, recurrent_modules
from tests.models.huggingface.configs import tiny
from tests.models.huggingface.support import KeepDouble, Run, packed_rows
from tests.models.huggingface.test_families import TOLERANCE, decoder_and_plain, errors
from tests.models.huggingface.test_meshes import CUT, SLICED, check

# One of each kind: delta rule by head and by channel, convolution alone, Mamba 2.
KINDS = ("qwen3_next", "kimi_linear", "lfm2", "bamba")


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", KINDS)
def test_logits_and_gradients_are_those_of_the_documents(family, recompute):
    assert max(errors(family, recompute)) < TOLERANCE


@pytest.mark.families
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_and_recomputation(family, recompute):
    assert max(errors(family, recompute)) < TOLERANCE


# Replicas share micro-batches of sliced pieces, and each recomputes in its own way.
SHARED = {"change": "sliced and merged", "checkpointing": "auto"}
# Steps of 1e-2 make errors of rounding a hundred times larger each.
THREE = {"steps": 3, "learning_rate": 1e-3}
MESHES = {
    "two ranks": (
        Run("olmo_hybrid", (2, 1, 1, 1)),
        Run("qwen3_5_text", (1, 2, 1, 1)),
        Run("nemotron_h", (1, 2, 1, 1), **SLICED),
        Run("qwen3_next", (1, 1, 2, 1)),
        Run("kimi_linear", (1, 1, 2, 1), **SLICED),
        Run("lfm2_moe", (1, 1, 2, 1), **CUT),
        Run("bamba", (1, 1, 2, 1), **SLICED, checkpointing="full"),
        Run("qwen3_5_text", (1, 1, 1, 2), steps=1),
        Run("nemotron_h", (1, 1, 1, 2), steps=1),
        Run("lfm2", (1, 1, 1, 2), steps=1),
    ),
    "four ranks": (
        Run("qwen3_next", (1, 1, 2, 2), **SLICED),
        Run("qwen3_5_moe_text", (2, 2, 1, 1), **SHARED),
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_steps_on_meshes(name):
    check(MESHES[name])


TWO = ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2))


@pytest.mark.families
@pytest.mark.parametrize("packing", [{}, SLICED], ids=["whole", "sliced"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_three_steps_of_every_family_on_two_ranks(family, packing):
    split = [mesh for mesh in TWO if mesh[3] == 1 or family != "lfm3"]
    check(tuple(Run(family, mesh, **THREE, **packing) for mesh in split))


@pytest.mark.families
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_three_steps_of_every_family_on_four_ranks(family):
    check(tuple(Run(family, (1, 2, 2, 1), **THREE, **packing) for packing in ({}, SLICED)))
    check(tuple(Run(family, mesh, **THREE, **SHARED) for mesh in ((2, 2, 1, 1), (2, 1, 2, 1))))


@cache
def decoder_of(family: str) -> HuggingFaceDecoder:
    return decoder_and_plain(family)[0]


def logits_of(family: str, lengths: list[int], order: list[int], one: bool = False) -> torch.Tensor:
    """Logits of the documents of ``order``, packed in that order, given back in their own.

    ``one`` says wrongly that all rows are one document's: no recurrence begins anew.
    """
    documents, _ = packed_rows(lengths)
    _, rows = packed_rows([lengths[number] for number in order])
    rows = replace(rows, tokens=torch.cat([documents[number] for number in order]), labels=None)
    if one:
        whole = RecurrentRows((Segment((0, 0), 0, rows.rows, False),), (rows.rows,))
        rows = replace(rows, recurrence=whole)
    with KeepDouble(), torch.no_grad():
        parts = decoder_of(family)(rows).split([lengths[number] for number in order])
    back = dict(zip(order, parts, strict=True))
    return torch.cat([back[number] for number in sorted(order)])


def check_neighbours(family: str, lengths: list[int], order: list[int], one: bool = False) -> None:
    """No packed document's logits are others than those that it has alone."""
    alone = [logits_of(family, lengths, [number]) for number in range(len(lengths))]
    packed = logits_of(family, lengths, order, one)
    assert torch.allclose(packed, torch.cat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", KINDS)
@settings(max_examples=4, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4), data=st.data())
def test_no_document_depends_on_its_neighbours(family, lengths, data):
    order = data.draw(st.permutations(range(len(lengths))))
    check_neighbours(family, lengths, order)
    # The same check finds documents that mix.
    with pytest.raises(AssertionError):
        check_neighbours(family, lengths, order, one=True)


def sliced_rows(length: int, cut: int) -> tuple[torch.Tensor, list]:
    """A document, and micro-batches of its two slices."""
    (document,), _ = packed_rows([length])
    parts = []
    for start, stop in ((0, cut), (cut, length)):
        _, rows = packed_rows([stop - start])
        segment = Segment((0, 0), start, stop, stop < length)
        recurrence = RecurrentRows((segment,), (stop - start,))
        parts.append(replace(rows, tokens=document[start:stop], labels=None, recurrence=recurrence))
    return document, parts


@pytest.mark.parametrize("cut", [1, 2, 7])  # shorter than a convolution's kernel, too
def test_a_slice_goes_on_where_the_one_before_ended_and_states_are_freed(cut):
    decoder = decoder_of("lfm2")
    run_layers = range(1)  # the convolution alone; attention needs keys of its own
    states = KeyValueCache().states
    document, parts = sliced_rows(9, cut)
    hidden = [
        torch.randn(9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    ]
    with KeepDouble():
        _, whole = packed_rows([9])
        x = hidden[0].clone().requires_grad_()
        wanted = decoder(replace(whole, tokens=document, labels=None), x, run_layers)
        (wanted * hidden[1]).sum().backward()
        pieces = [x.detach()[:cut].requires_grad_(), x.detach()[cut:].requires_grad_()]
        outs = [
            decoder(
                replace(part, recurrence=replace(part.recurrence, states=states)), each, run_layers
            )
            for part, each in zip(parts, pieces, strict=True)
        ]
        assert len(states.held) == 1
        for out, weight in reversed([*zip(outs, hidden[1].split([cut, 9 - cut]), strict=True)]):
            (out * weight).sum().backward()
    assert torch.allclose(torch.cat(outs), wanted, atol=1e-13)
    assert torch.allclose(torch.cat([each.grad for each in pieces]), x.grad, atol=1e-13)
    assert len(states.held) == 0


@pytest.mark.parametrize("one_call", [False, True])
def test_delta_rules_of_slices_by_kernels_that_take_all_segments_at_once(one_call, monkeypatch):
    """The call is flash-linear-attention's, of a stand-in that computes it segment by segment."""
    family, name = "qwen3_next", "torch_chunk_gated_delta_rule"
    decoder = decoder_of(family)
    source = sys.modules[type(next(recurrent_modules(decoder.layers.values()))).__module__]
    theirs = getattr(source, name).__wrapped__

    def kernel(q, k, v, *, g, beta, initial_state, output_final_state, cu_seqlens, **options):
        outs, ends = [], []
        for number, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
            first = None if initial_state is None else initial_state[number : number + 1]
            rows = [x[:, start:stop] for x in (q, k, v)]
            out, end = theirs(
                *rows,
                g=g[:, start:stop],
                beta=beta[:, start:stop],
                initial_state=first,
                output_final_state=True,
                **options,
            )
            outs.append(out)
            ends.append(end)
        return torch.cat(outs, 1), torch.cat(ends) if output_final_state else None

    if one_call:
        monkeypatch.setattr(recurrent_functions, "takes_segments", lambda x: True)
        monkeypatch.setattr(
            source, name, recurrent._replaced(name, kernel, recurrent_functions.FUNCTIONS[name])
        )
    # Two documents; the second is cut, and its end is packed behind a third.
    lengths, cut = (5, 9, 4), 3
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(18, 32, dtype=torch.float64, generator=generator)
    weight = torch.randn(18, 32, dtype=torch.float64, generator=generator)
    parts = [
        ([Segment((0, 0), 0, 5, False), Segment((1, 0), 0, cut, True)], slice(0, 8)),
        ([Segment((1, 0), cut, 9, False), Segment((2, 0), 0, 4, False)], slice(8, 18)),
    ]
    states = KeyValueCache().states
    with KeepDouble():
        _, rows = packed_rows(lengths)
        x = hidden.clone().requires_grad_()
        wanted = decoder(replace(rows, labels=None), x, range(1))
        (wanted * weight).sum().backward()
        outs, inputs = [], []
        for segments, where in parts:
            _, rows = packed_rows([each.stop - each.start for each in segments])
            recurrence = RecurrentRows(tuple(segments), (rows.rows,), states=states)
            inputs.append(hidden[where].clone().requires_grad_())
            rows = replace(rows, labels=None, recurrence=recurrence)
            outs.append(decoder(rows, inputs[-1], range(1)))
        assert len(states.held) == 2  # of the convolution and of the delta rule
        for out, (_, where) in reversed([*zip(outs, parts, strict=True)]):
            (out * weight[where]).sum().backward()
    assert torch.allclose(torch.cat(outs), wanted, atol=1e-12)
    assert torch.allclose(torch.cat([each.grad for each in inputs]), x.grad, atol=1e-12)
    assert len(states.held) == 0


def test_a_batch_that_does_not_say_where_documents_begin_is_refused():
    _, rows = packed_rows([5])
    with pytest.raises(ValueError, match=r"make_step_batch\(..., recurrent=True\)"):
        decoder_of("lfm2")(replace(rows, recurrence=None))


def test_a_slice_without_the_steps_states_is_refused():
    _, (first, _) = sliced_rows(9, 4)
    with pytest.raises(ValueError, match="needs the step's states"):
        decoder_of("lfm2")(first)


def test_tensor_parallelism_without_a_plan_is_refused():
    with pytest.raises(ValueError, match="Use tensor_parallel_size=1"):
        decoder_of("lfm3").tensor_parallel_plan(2)


def test_the_family_outside_of_a_decoder_runs_as_it_did():
    decoder_of("qwen3_next")
    _, plain = decoder_and_plain("qwen3_next")
    (document,), _ = packed_rows([11])
    with KeepDouble(), torch.no_grad():
        once = plain(document[None], use_cache=False).logits
        cached = plain(document[None, :8], use_cache=True)
        rest = plain(document[None, 8:], past_key_values=cached.past_key_values).logits
    assert torch.allclose(rest, once[:, 8:], atol=1e-10)


def test_shapes_have_what_recurrences_compute_and_leave():
    shape = shape_of(tiny("qwen3_next"))
    linear, attention = shape.kinds
    assert attention.attends
    # Keys and queries of 2 heads of 8, values of 4 heads of 16, through a convolution of 4 tokens.
    channels, values = 2 * 2 * 8 + 4 * 16, 4 * 16
    rule = 4 * (5 * 64 * 8 + 3 * 64 * 16 + 6 * 8 * 16)
    assert linear.recurrence == Recurrence(
        heads=4,
        flops=rule + 2 * 4 * channels,
        moved=2 * channels + (channels + 2 * 4) + values,
        state=4 * 8 * 16,
        last_rows=3 * channels,
    )
    assert shape.sliding_window is None
    assert (shape.heads, shape.kv_heads) == (attention.heads, attention.kv_heads)
    assert shape.recurrent_heads == 4
    assert not shape_of(tiny("llama")).recurrent
    between = [each.recurrence for each in shape_of(tiny("nemotron_h")).each_layer]
    assert Recurrence() in between  # feed-forward networks alone


def test_ranks_that_do_not_divide_recurrent_heads_are_refused_at_once():
    shape = shape_of(tiny("qwen3_next"))
    shape.check_tensor_parallel(2, 2)
    with pytest.raises(ValueError, match="one of 1, 2, 4"):
        shape.check_tensor_parallel(2, 4)
