"""The arithmetic of the comparison with other people's packers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import packers_runs as runs
from benchmarks import peers
from benchmarks.peer_steps import COUNT, PEERS, Documents, dealt
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Slice
from lightning_wlb.prediction.predictor import Predictor, model_stages
from lightning_wlb.sharding import layout

SHAPE = ModelShape(4096, 4, 32, 8, 128, 14_336, 32_000)


def predictor(mesh: Mesh) -> Predictor:
    latency = LatencyModel(Profile.load("h100-fa2"), SHAPE, mesh)
    return Predictor(latency, tuple(model_stages(SHAPE, mesh.stages, 1000)))


def packed(*replicas: list[list[int]]) -> runs.Packed:
    return [[[Slice(n, 0, 0, n) for n in group] for group in own] for own in replicas]


def test_bound_of_one_document_is_its_step() -> None:
    """On one rank there is nowhere else for attention to go."""
    alone = predictor(Mesh())
    bound = runs.attention_anywhere(alone, [[8192]], 1)
    assert bound == runs.simulated(alone, [packed([[8192]])], "per_document")
    assert bound is not None
    assert bound.keys == bound.again == 0


def test_bound_halves_a_document_over_two_replicas() -> None:
    """Rows and attention of a replica are half of the document's; no keys are exchanged."""
    two = predictor(Mesh(data=2))
    bound = runs.attention_anywhere(two, [[16_384]], 1)
    latency = two.latency
    each = np.array([16_384])
    attention = [ns // 2 for ns in latency.attention_ns(each, each)]
    rows = latency.rows_ns(8192)
    layers = SHAPE.layers * (rows.forward + rows.backward + sum(attention))
    parts = two.memory.parts[0]
    parameters = two.memory.model.parameters(parts) - SHAPE.vocab_size * SHAPE.dim
    ends = sum(
        latency.head_ns(8192, backward=each)
        + latency.embedding_ns(8192, backward=each)
        + latency.action_ns(8192, parameters, backward=each)
        for each in (False, True)
    )
    assert bound is not None
    assert bound.idle == pytest.approx(1 - (layers + ends) / bound.ns, abs=1e-9)


@given(st.lists(st.integers(1, 64), min_size=2, max_size=2), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_bound_is_below_every_dealing(blocks: list[int], steps: int) -> None:
    """Each of two replicas has a document: the slower is no faster than both evenly loaded."""
    lengths = [128 * each for each in blocks]
    two = predictor(Mesh(data=2))
    bound = runs.attention_anywhere(two, [lengths] * steps, 1)
    plan = runs.simulated(two, [packed([[lengths[0]]], [[lengths[1]]])] * steps, "per_document")
    assert bound is not None
    assert plan is not None
    assert bound.ns <= plan.ns
    assert (bound.flops, bound.tokens) == (plan.flops, plan.tokens)
    assert plan.tokens == steps * sum(lengths)


def test_the_least_recomputation_that_fits_is_taken_for_all_steps() -> None:
    alone = predictor(Mesh())
    short, long = packed([[1024]]), packed([[131_072]])
    modes = [runs.simulated(alone, steps, "per_document") for steps in ([short], [short, long])]
    assert modes[0] is not None
    assert modes[0].mode == "none"
    assert modes[1] is None or modes[1].mode != "none" or modes[1].again == 0
    assert runs.simulated(alone, [packed([[131_072] * 40])], "per_document") is None


def test_recomputation_and_keys_are_shares_of_the_time() -> None:
    """A layer's time is products, attention, keys and what is computed again."""
    pair = predictor(Mesh(context=2))
    replica = [Slice(0, 0, 0, 4096)]
    cost = pair.micro_batch(replica, "per_document")
    full = cost._replace(recompute="full")
    busy, keys, again = runs.busy_ns(pair, [full])
    plain, same_keys, none = runs.busy_ns(pair, [cost])
    assert none == 0 < again
    assert keys == same_keys
    waits = [sum(each.attention_ns) - sum(each.mean_attention_ns) for each in (full, cost)]
    assert busy - plain == pytest.approx(again - SHAPE.layers * (waits[0] - waits[1]), rel=1e-9)
    rows = pair.latency.rows_ns(cost.rows)
    each = sum(cost.layer_ns[0]) - rows.forward - rows.backward - sum(cost.attention_ns)
    assert keys == SHAPE.layers * each > 0


def test_windows_are_cut_from_the_concatenated_documents() -> None:
    window = runs.WINDOW
    rows = runs.windows_of(np.array([window - 10, 30, 2 * window]))
    assert rows == [
        [Slice(0, 0, 0, window - 10), Slice(1, 0, 0, 10)],
        [Slice(1, 10, 10, 30), Slice(2, 0, 0, window - 20)],
        [Slice(2, window - 20, window - 20, 2 * window - 20)],
    ]


def test_rows_are_dealt_to_replicas_in_turn() -> None:
    rows = [[Slice(at, 0, 0, 1)] for at in range(COUNT + 1)]
    (step,) = dealt(rows, Mesh(data=4), 2)
    assert [[[part.document for part in group] for group in own] for own in step] == [
        [[at, at + 4], [at + 8, at + 12]] for at in range(4)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_head_and_tail_is_per_sequence(ranks: int) -> None:
    lengths = [100, 412, 3, 509]
    ours = layout("per_sequence", lengths, ranks, 1)
    theirs = runs.torch_layout(lengths, ranks, "head_tail")
    assert sorted(theirs.table.tolist()) == sorted(ours.table.tolist())
    assert theirs.rows == ours.rows


def test_torchs_ptrr_deals_blocks_by_the_keys_that_they_see() -> None:
    """Blocks 0 to 3 see 1, 2, 1, 2 blocks: dealt 1, 3 forwards, then 2, 0 backwards."""
    dealt_blocks = [[(128, 384)], [(0, 128), (384, 512)]]
    assert peers.torch_chunks([256, 256], 2, "ptrr") == dealt_blocks
    chunks = peers.torch_chunks([512, 512], 2, "ptrr")
    tokens = sorted(token for own in chunks for start, stop in own for token in range(start, stop))
    assert tokens == list(range(1024))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_document_is_in_one_micro_batch_of_a_step(peer: object) -> None:
    """Of packers that are here; others are skipped."""
    rng = np.random.default_rng(1)
    batches = [rng.integers(1000, 20_000, 64).tolist() for _ in range(4)]
    documents = Documents(SHAPE, np.array([n for own in batches for n in own]), batches)
    mesh = Mesh(data=2)
    try:
        steps = list(peer.pack(documents, mesh, peer.limits(mesh)[0], None))
    except peers.Missing as word:
        pytest.skip(f"missing: {word}")
    for step in steps:
        assert len(step) == mesh.data
        parts = [part for own in step for group in own for part in group]
        assert len({(part.document, part.start) for part in parts}) == len(parts)
        assert all(0 <= part.start < part.stop for part in parts)


def test_a_file_runs_without_what_its_package_imports(tmp_path: Path) -> None:
    """Named files are read, other modules are empty, and nothing of the package stays imported."""
    folder = tmp_path / "DistCA" / "distca"
    folder.mkdir(parents=True)
    (folder / "helper.py").write_text("import distca.gone\nTWO = 2\n")
    (folder / "main.py").write_text(
        "from distca.absent import Base\nfrom distca.helper import TWO\n"
        "class Mine(Base):\n    value = TWO\n"
    )
    module = peers.module_of("distca", "distca.main", ("distca.helper",), clones=tmp_path)
    assert module.Mine.value == 2
    assert not [name for name in sys.modules if name.startswith("distca")]
    with pytest.raises(peers.Missing, match="DistCA"):
        peers.module_of("distca", "distca.other", clones=tmp_path)
