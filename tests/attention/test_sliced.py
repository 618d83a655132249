"""Sliced attention on one rank: what is copied, and in which dtype gradients are summed.

That outputs and gradients are right, on any mesh, is tested where whole steps are
(tests/strategy/test_gradients.py and test_random_plans.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.packed import packed_attention
from lightning_wlb.distributed.process_groups import NO_GROUPS
from lightning_wlb.sharding.sliced_indices import Run
from tests.attention.test_packed import slices_of


class Seen(VarlenAttention):
    """Remembers the keys and values of its last call."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *arguments: object) -> Tensor:
        self.last = k, v
        return super().__call__(q, k, v, *arguments)  # type: ignore[arg-type]


def test_a_first_slice_copies_nothing_and_the_cache_holds_its_keys_themselves() -> None:
    first, second = (each.for_layer(0) for each, _ in slices_of([0, 3, 5]))
    attention = Seen("cpu")
    q, k, v = (torch.randn(3, 2, 8, requires_grad=True) for _ in range(3))
    packed_attention(q, k, v, None, first, attention, NO_GROUPS)
    assert [x.data_ptr() for x in attention.last] == [k.data_ptr(), v.data_ptr()]
    assert first.slices is not None
    cache = first.slices.cache
    assert cache is not None
    held = cache.read(0, Run(0, 0, 3))
    assert [x.data_ptr() for x in held] == [k.data_ptr(), v.data_ptr()]
    assert (list(cache._pairs), cache.gradients) == ([(0, 0)], {})
    own_q, own_k, own_v = (torch.randn(2, 2, 8, requires_grad=True) for _ in range(3))
    out = packed_attention(own_q, own_k, own_v, None, second, attention, NO_GROUPS)
    for read, earlier, own in zip(attention.last, (k, v), (own_k, own_v), strict=True):
        assert torch.equal(read, torch.cat((earlier, own)))
    # The last slice is read by none. What the first one is read for comes back to it.
    assert list(cache._pairs) == [(0, 0)]
    out.sum().backward()
    assert [x.shape for x in cache.gradients[0, 0]] == [k.shape, v.shape]


def test_gradients_of_half_types_are_summed_in_float32() -> None:
    """One token's value is read by three slices: 256 and twice 1, which bfloat16 cannot add up."""
    every = [each.for_layer(0) for each, _ in slices_of([0, 1, 2, 3])]
    attention = VarlenAttention("cpu")
    zero = torch.zeros(1, 1, 8, dtype=torch.bfloat16)  # every key in sight weighs the same
    values = [torch.zeros_like(zero).requires_grad_() for _ in every]
    outs = [
        packed_attention(zero, zero, value, None, metadata, attention, NO_GROUPS)
        for value, metadata in zip(values, every, strict=True)
    ]
    for out, share in reversed(list(zip(outs, (256.0, 2.0, 3.0), strict=True))):
        out.backward(torch.full_like(out, share))
    assert values[0].grad is not None
    assert values[0].grad.flatten().tolist() == [258.0] * 8
