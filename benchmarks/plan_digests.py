"""Fingerprints of the plans that the packings make: did a change of code move any plan.

Every setting is a packing, a corpus (Generator A, the standard library) and a mesh, planned for
some steps with the reference work; its fingerprint is over the JSON of all these plans.
``benchmarks/results/plan_digests.json`` holds the fingerprints that were committed last. A change
of code that should leave plans alone is held to them::

    python -m benchmarks.plan_digests            # 100 steps of all settings, some minutes
    python -m benchmarks.plan_digests --write    # a change that moves plans on purpose

The last line is a JSON object: how many settings were compared, and which differ.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.fixed_greedy import METHODS
from benchmarks.workloads import REFERENCE_WORK, documents_for, generator_a, stdlib_lengths
from lightning_wlb.mesh import Mesh
from lightning_wlb.planning import DataSettings, Planner

RESULTS = Path(__file__).with_name("results") / "plan_digests.json"
STEPS = 100
PACKINGS = ("original", "best_fit", "fixed_greedy", "wlb", "slim", "auto")
WINDOWS = {"generator_a": 131_072, "stdlib": 131_072}  # tokens


class Setting(NamedTuple):
    """One row.

    Attributes:
        packing: method.
        corpus: a key of :data:`WINDOWS`.
        micro_batches: N.
        data: data-parallel replicas.
        pipeline: pipeline stages.
        context: context-parallel ranks.
    """

    packing: str
    corpus: str
    micro_batches: int
    data: int
    pipeline: int
    context: int

    def __str__(self) -> str:
        return (
            f"{self.packing} {self.corpus} N={self.micro_batches} DP={self.data}"
            f" PP={self.pipeline} CP={self.context}"
        )


def settings() -> Iterator[Setting]:
    """All rows."""
    for packing in PACKINGS:
        for corpus in WINDOWS:
            for micro_batches in (4, 16):
                for data in (1, 4):
                    for pipeline in (1, 4):
                        for context in (1, 2):
                            yield Setting(packing, corpus, micro_batches, data, pipeline, context)


def digest(setting: Setting, steps: int) -> str:
    """Fingerprint of the plans of the first ``steps`` steps."""
    window = WINDOWS[setting.corpus]
    if setting.corpus == "stdlib":
        lengths = stdlib_lengths()
    else:
        lengths = generator_a(documents_for(STEPS, setting.micro_batches, window), window, seed=0)
    planner = Planner(
        np.asarray(lengths),
        DataSettings(
            window, setting.micro_batches, packing=METHODS.get(setting.packing, setting.packing)
        ),
        REFERENCE_WORK,
        Mesh(setting.data, setting.pipeline, setting.context),
    )
    sha = hashlib.sha256()
    done = 0
    while done < steps:
        plan = planner.next_step()
        if plan is None:
            continue
        done += 1
        sha.update(plan.to_json().encode())
    return sha.hexdigest()[:16]


def main() -> None:
    parser = report.parser("plan_digests", __doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each setting")
    parser.add_argument("--only", default="", help="settings whose name contains this text")
    parser.add_argument("--write", action="store_true", help="commit the fingerprints to the file")
    arguments = parser.parse_args()
    chosen = [each for each in settings() if arguments.only in str(each)]
    made: dict[str, str] = {}
    with ProcessPoolExecutor() as pool:
        answers = pool.map(digest, chosen, [arguments.steps] * len(chosen))
        for setting, answer in zip(chosen, answers, strict=True):
            made[str(setting)] = answer
            print(f"{answer}  {setting}", flush=True)
    if arguments.write:
        kept = json.loads(RESULTS.read_text())["digests"] if arguments.only else {}
        written = {"steps": arguments.steps, "digests": kept | made}
        RESULTS.write_text(json.dumps(written, indent=1) + "\n")
    if not RESULTS.exists():
        sys.exit(f"{RESULTS} does not exist; --write makes it.")
    known = json.loads(RESULTS.read_text())
    if known["steps"] != arguments.steps:
        sys.exit(f"{RESULTS} holds {known['steps']} steps of each setting, not {arguments.steps}.")
    differing = [name for name, value in made.items() if known["digests"].get(name) != value]
    print(json.dumps({"settings": len(made), "steps": arguments.steps, "differing": differing}))
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
