"""What a rank takes to work out its link to a step's strategy, up to 1,024 ranks, and what travels.

Parameters of a 7B rest on pipelines of 2 stages and 4 tensor-parallel ranks. In the step a third of
the ranks is in such pipelines, a third in pipelines of context 2 and tensor 2, and the others in
pipelines of tensor 4. The last rank works out all of its exchanges, pulls and pushes of every slot:
at first, and again, when the index arithmetic is kept. The gigabytes in bfloat16 are those that the
pull brings to this rank from other nodes, and those that it would bring over one hop.

Run ``python -m benchmarks.links --help``. Prints a table and, last, one JSON object.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import report
from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.heterogeneous.planning.sharded_layouts import Weights
from lightning_wlb.heterogeneous.setup import weights_of
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Scheme, Schemes, schemes_of

PER_NODE = 8
RANKS = (8, 64, 256, 1024)
LIMIT_MS = 200
"""For 1,024 ranks."""


def mixed(ranks: int, layers: int) -> Schemes:
    """Three kinds of pipelines, the largest first."""
    half = layers // 2
    shapes = [((half, layers - half), 1, 4)] * (ranks // 24) + [((layers,), 2, 2)] * (ranks // 12)
    made: list[Scheme] = []
    first = 0
    for shape in [*shapes, *[((layers,), 1, 4)] * ranks]:
        scheme = Scheme(first, *shape)
        if scheme.ranks.stop <= ranks:
            made.append(scheme)
            first = scheme.ranks.stop
    return tuple(made)


def measure(weights: Weights, ranks: int, repeats: int) -> dict[str, Any]:
    """Least milliseconds of processor time, and gigabytes from other nodes, of the last rank."""
    half = weights.layers // 2
    stages = [range(half), range(half, weights.layers)]
    base = schemes_of(Mesh(ranks // 8, 2, 1, 4), stages)
    strategy = mixed(ranks, weights.layers)

    def all_exchanges(link: Redistribution) -> float:
        begin = time.process_time()
        for slot in range(link.turns):
            for hop in range(link.hops):
                for push in (False, True):
                    link.exchange(slot, hop, push=push)
        return 1000 * (time.process_time() - begin)

    first, again = [], []
    for _ in range(repeats):
        link = Redistribution(weights, base, strategy, ranks - 1, PER_NODE)
        first.append(all_exchanges(link))
        again.append(all_exchanges(link))
    return {
        "ranks": ranks,
        "pipelines": len(strategy),
        "slots": link.turns,
        "first_ms": round(min(first), 1),
        "again_ms": round(min(again), 1),
        "gigabytes_in": round(_entering(link), 3),
        "gigabytes_in_one_hop": round(
            _entering(Redistribution(weights, base, strategy, ranks - 1, ranks)), 3
        ),
    }


def _entering(link: Redistribution) -> float:
    """By the first hop of the pull."""
    count = 0
    for slot in range(link.turns):
        into = link.exchange(slot, 0).into
        count += int(into.elements[into.peer // PER_NODE != link.rank // PER_NODE].sum())
    return 2 * count / 1e9


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("links", __doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--layers", type=int, help="of the model (default: those of a 7B)")
    parser.add_argument("--repeats", type=int, default=5, help="the least is taken (default 5)")
    parser.add_argument("--output", type=Path, help="also write the result to this .json")
    arguments = parser.parse_args(argv)
    changed = {} if arguments.layers is None else {"layers": arguments.layers}
    with torch.device("meta"):
        model = Transformer(TransformerConfig.preset("7b", **changed))
    weights = weights_of(model, (1, 2, 4))
    rows = [measure(weights, ranks, arguments.repeats) for ranks in arguments.ranks]
    headings = list(rows[0])
    cells = [[str(row[name]) for name in headings] for row in rows]
    Console(width=140).print(report.table("Links of the last rank", headings, cells))
    report.finish({"benchmark": "links", "rows": rows, "limit_ms": LIMIT_MS}, arguments.output)


if __name__ == "__main__":
    main()
