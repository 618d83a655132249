"""What a step takes with other people's packers, by their own code, and with ours, on one profile.

A window of 131,072 tokens and 16 windows a step, models and clusters of :data:`SETTINGS`. The step
is simulated from one device profile, on this package's executor: only the packing is theirs. Every
packer gets every data × pipeline × context × tensor mesh of powers of two that its own code can
serve (``benchmarks.peer_steps.PEERS`` says which), several limits of tokens, and of no, selective
and full recomputation the least that fits in memory in all steps, and the fastest of these counts.
The sharding over context-parallel ranks is the one that its framework has. Ours is ``auto`` as a
user gets it with a profile: the mesh that the search chooses and each micro-batch's own
recomputation. It plans by the profile that also judges it, and others by a formula of their own, so
it is there once more planned by exact work; and once more without a pipeline, as several others
have none. Stages are not virtual, and communication overlaps with nothing, for nobody. Times are
per FLOP of the model, as packers that cut documents do less work for a token.

Torch's own balancers of context parallelism deal the tokens of a micro-batch, not documents, so
they are compared apart (:func:`.balancers`): windows cut from the concatenated documents, time of a
layer, against the sharding that ``adaptive`` chooses.

*Attention anywhere* is what could be gained at most by sending attention to whichever rank is free
(the idea of DistCA, arXiv:2510.18121): see :func:`.attention_anywhere`.

The other packers are imported from where they are installed (``pip install --no-deps verl==0.9.1
trl==1.16.0 megatron-core==0.16.1`` beside torch and transformers), and what no wheel has from
clones of their repositories: ``--clones FOLDER``, with Megatron-LM, slime and DistCA in it
(:mod:`benchmarks.peers`). One that is missing is left out, with a word.

Run ``python -m benchmarks.packers --help``. Prints tables and, last, one JSON object; with
``--output`` it is kept, and a page and a picture go beside it. Rows that are there already are not
made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks import peers, report
from benchmarks.meshes import MODELS, powers
from benchmarks.packers_page import ALONE, BOUND, BY_WORK, OURS, page, picture, tables
from benchmarks.packers_runs import (
    Outcome,
    attention_anywhere,
    balancers,
    busy_ns,
    hybrid,
    simulated,
)
from benchmarks.peer_steps import COUNT, PEERS, WINDOW, Documents, Peer, needed
from benchmarks.workloads import documents_for, generator_a, stdlib_lengths
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.evaluate import evaluate, name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import choose_mesh
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.planner import plan_steps
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.prediction.predictor import Predictor

FINALISTS = 2
"""Meshes, with their limits, of which all steps are simulated; the others are left after one."""


@dataclass(frozen=True)
class Setting:
    """A model, a cluster in nodes as large as the profile says, and the name of documents."""

    model: str
    devices: int
    lengths: str


SETTINGS = {
    f"{model} on {devices}, {lengths}": Setting(model, devices, lengths)
    for model, devices, lengths in (
        ("llama3-8B", 32, "DistCA prolong"),
        ("llama3-8B", 32, "DistCA wlbllm"),
        ("llama3-8B", 32, "Generator A"),
        ("llama3-8B", 32, "standard library"),
        ("70B", 64, "Generator A"),
    )
}


# The comparison


class Candidate(NamedTuple):
    """A mesh and a limit, and how the first so many steps are simulated with them."""

    mesh: Mesh
    limit: int
    run: Callable[[int], Outcome | None]


def fastest(candidates: Iterable[Candidate], steps: int) -> tuple[Mesh, int, Outcome] | None:
    """The fastest on all steps, of the :data:`FINALISTS` that are fastest on the first one."""
    first = [(outcome.rate, at, each) for at, each in enumerate(candidates)
             if (outcome := each.run(1)) is not None]  # fmt: skip
    finals = [(each, each.run(steps)) for _, _, each in sorted(first)[:FINALISTS]]
    fitting = [(each.mesh, each.limit, outcome) for each, outcome in finals if outcome is not None]
    return min(fitting, key=lambda found: found[2].rate, default=None)


def meshes(request: MeshRequest, axes: Sequence[str]) -> Iterator[Mesh]:
    """Meshes of powers of two with these axes besides data, on which the state fits."""
    most = {axis: request.devices if axis in axes else 1 for axis in ("pipeline", "context")}
    for tensor in powers(request.devices_per_node or 1 if "tensor" in axes else 1):
        for pipeline in powers(most["pipeline"] // (tensor if most["pipeline"] > 1 else 1)):
            left = request.devices // tensor // pipeline
            for context in powers(left if most["context"] > 1 else 1):
                mesh = Mesh(left // context, pipeline, context, tensor)
                predictor = request.predictor(mesh)
                if max(predictor.memory.state_bytes) < predictor.usable_bytes:
                    yield mesh


def of_peer(peer: Peer, request: MeshRequest, documents: Documents,
            clones: Path | None) -> Iterator[Candidate]:  # fmt: skip
    """Every mesh and limit that a packer can be run with."""
    for mesh in meshes(request, peer.axes):
        predictor = request.predictor(mesh)
        for limit in peer.limits(mesh):

            def run(
                count: int, predictor: Predictor = predictor, limit: int = limit
            ) -> Outcome | None:
                packed = peer.pack(documents, predictor.latency.mesh, limit, clones)
                try:
                    steps = list(islice(packed, count))
                except (AssertionError, ValueError):
                    return None  # its own code refuses these sizes
                if not steps:
                    return None  # so few documents make no step of so many
                return simulated(predictor, steps, peer.sharding)

            yield Candidate(mesh, limit, run)


def of_hybrid(
    request: MeshRequest, documents: Documents, clones: Path | None
) -> Iterator[Candidate]:
    """The same of Megatron's hybrid context parallelism, whose data axis is data × context."""
    for mesh in meshes(request, ("tensor",)):
        for share in powers(mesh.data):

            def run(count: int, mesh: Mesh = mesh, limit: int = WINDOW // share) -> Outcome | None:
                return hybrid(request, mesh, documents.steps[:count], limit, clones)

            yield Candidate(mesh, WINDOW // share, run)


def of_bound(request: MeshRequest, documents: Documents) -> Iterator[Candidate]:
    """The same of :func:`attention_anywhere`; the limit is the micro-batches of a replica."""
    for mesh in meshes(request, ("pipeline", "context", "tensor")):
        for count in powers(64):

            def run(first: int, mesh: Mesh = mesh, count: int = count) -> Outcome | None:
                return attention_anywhere(request.predictor(mesh), documents.steps[:first], count)

            yield Candidate(mesh, count, run)


def ours(request: MeshRequest, *, by_profile: bool = True) -> tuple[Mesh, None, Outcome] | None:
    """``auto`` on the mesh that the search chooses from two steps; None where none fits."""
    try:
        mesh = choose_mesh(replace(request, steps=2)).best.mesh
    except ValueError:
        return None
    predictor = request.predictor(mesh)
    plans = None
    if not by_profile:  # and then with the recomputation that fits, which exact work does not know
        scorer = ProfileScorer(predictor, request.activation_checkpointing)
        by_work = plan_steps(request.planner(predictor, None), request.steps)
        plans = [replace(each, replicas=tuple(scorer.settled(each.replicas))) for each in by_work]
    made = evaluate(request, mesh, plans)
    busy = np.sum([busy_ns(predictor, own) for step in made.steps for own in step.costs], axis=0)
    row = made.row
    shares = busy / (row.steps_ns * mesh.data * mesh.pipeline)
    own_plans = [own for step in made.steps for own in step.plan.replicas]
    modes = {each.recompute for own in own_plans for each in own.forward}
    return mesh, None, Outcome(
        row.steps_ns, row.flops, row.tokens, 1 - shares[0], *shares[1:].tolist(), row.peak_bytes,
        "+".join(mode for mode in MODES if mode in modes),
    )  # fmt: skip


def row_of(mesh: Mesh, limit: int | None, outcome: Outcome, source: str) -> dict[str, Any]:
    """A row of the result; ``step_ms`` is of a whole global batch."""
    return {
        "source": source,
        "mesh": name_of(mesh),
        "limit": limit,
        "ns_per_gigaflop": outcome.rate * 1e9,
        "step_ms": outcome.ns / outcome.tokens * COUNT * WINDOW / 1e6,
        "idle": outcome.idle,
        "keys": outcome.keys,
        "again": outcome.again,
        "gigabytes": outcome.peak / 1e9,
        "recompute": outcome.mode,
    }


def lengths_of(name: str, clones: Path | None, documents: int) -> np.ndarray:
    """Lengths of a workload, in a fixed random order, documents above the window cut.

    Raises:
        benchmarks.peers.Missing: DistCA's samples without its clone.
    """
    if name == "Generator A":
        return generator_a(documents, WINDOW, 1)
    if name == "standard library":
        found = stdlib_lengths()
    else:
        sample = name.rpartition(" ")[2]
        path = needed(clones) / f"DistCA/distca/simulator/data/dist_{sample}.json"
        if not path.exists():
            raise peers.Missing("DistCA")
        found = np.array(json.loads(path.read_text()), dtype=np.int64)
    found = np.random.default_rng(1).permutation(found)
    cut = [[WINDOW] * (n // WINDOW) + [n % WINDOW] * (n % WINDOW > 0) for n in found.tolist()]
    return np.array([piece for pieces in cut for piece in pieces], dtype=np.int64)


HYBRID = "Megatron BalancedCPScheduler"


def compared(setting: Setting, profile: Profile, steps: int, clones: Path | None,
             kept: dict[str, Any], save: Callable[[], None]) -> None:  # fmt: skip
    """All packers on one setting; rows that are kept are not made again."""
    lengths = lengths_of(setting.lengths, clones, documents_for(steps + 2, COUNT, WINDOW))
    shape = MODELS[setting.model]

    def asked(**fixed: int) -> MeshRequest:
        return MeshRequest(
            lengths=lengths, shape=shape, data=DataSettings(WINDOW, COUNT, shuffle=False),
            profile=profile, devices=setting.devices, fixed=fixed, schedule="1f1b",
            virtual_stages=1, steps=steps,
        )  # fmt: skip

    def put(
        name: str, source: str, make: Callable[[], tuple[Mesh, int | None, Outcome] | None]
    ) -> None:
        if name not in kept:
            try:
                found = make()
                kept[name] = {"word": "does not fit"} if found is None else row_of(
                    *found, source and peers.version(source, clones)
                )  # fmt: skip
            except peers.Missing as word:
                kept[name] = {"word": f"missing: {word}"}
            save()

    request = asked()
    planner = Planner(lengths, request.data, Work.of(shape))
    released = [planner.release() for _ in range(steps)]
    batches = [
        [piece.tokens for group in release.micro_batches for piece in group]
        for release in released if release is not None
    ]  # fmt: skip
    every = np.array([tokens for batch in batches for tokens in batch], dtype=np.int64)
    documents = Documents(shape, every, batches)
    put(OURS, "", lambda: ours(request))
    sizes = dict(zip(AXES, map(int, kept[OURS]["mesh"].split(",")), strict=True))
    put(BY_WORK, "", lambda: ours(asked(**sizes), by_profile=False))
    if sizes["pipeline"] == 1:
        kept.setdefault(ALONE, kept[OURS])
    put(ALONE, "", lambda: ours(asked(pipeline=1)))
    put(BOUND, "", lambda: fastest(of_bound(request, documents), steps))
    for peer in PEERS:
        tried = of_peer(peer, request, documents, clones)
        put(peer.name, peer.source, lambda tried=tried: fastest(tried, steps))
    put(HYBRID, "megatron", lambda: fastest(of_hybrid(request, documents, clones), steps))
    if "torch" not in kept and setting.model == "llama3-8B":
        kept["torch"] = balancers(request, documents.lengths)
        save()


def main(argv: list[str] | None = None) -> None:
    parser = report.settings_parser("packers", __doc__, SETTINGS, 3, "h100-fa2")
    parser.add_argument("--clones", type=Path, help="folder with Megatron-LM, slime and DistCA")
    arguments = parser.parse_args(argv)
    profile = Profile.load(arguments.profile)
    result, save = report.gone_on_with("packers", profile, arguments)
    result.setdefault("settings", {})
    for name in arguments.settings:
        kept = result["settings"].setdefault(name, {})
        try:
            compared(SETTINGS[name], profile, arguments.steps, arguments.clones, kept, save)
        except peers.Missing as word:
            del result["settings"][name]
            print(f"{name}: missing: {word}")
    console = Console(width=200)
    for title, headings, rows in tables(result):
        console.print(report.table(title, headings, rows))
    if arguments.output:
        arguments.output.with_suffix(".md").write_text(page(result))
        picture(result, arguments.output.with_suffix(".png"))
    report.finish(result)


if __name__ == "__main__":
    main()
