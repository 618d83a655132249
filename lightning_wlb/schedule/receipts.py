"""When a rank knows that a message of its own has arrived, from the programs alone.

A rank that has received what a neighbour sent *after* an action knows that the neighbour had by
then received everything that this action needed. So a send may be let go of, without asking and
without waiting, at the next message that comes back; without it every message of a step would be
held until the step's end. What nothing comes back after (the last backwards of the pipeline, one
for each forward of the warm-up) is held until then.

Linear in the actions of two neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_wlb.schedule.actions import Action, source_of, target_of


def receipts(
    programs: Mapping[int, Sequence[Action]], rank: int, ranks: int, stages: int
) -> dict[Action, list[Action]]:
    """Which sends have certainly been received when an action has got its message.

    Args:
        programs: of the neighbours of the rank in the ring of ranks, by rank; others are ignored.
        rank: whose sends.
        ranks: of the pipeline.
        stages: over all ranks.

    Returns:
        For actions of the rank that receive a message from another rank: those of its actions
        whose messages the sender had received before it sent this one, each once, in the order in
        which it received them.
    """
    proven: dict[Action, list[Action]] = {}
    for peer in sorted({(rank - 1) % ranks, (rank + 1) % ranks} - {rank}):
        received: list[Action] = []
        for action in programs[peer]:
            source, target = source_of(action, stages), target_of(action, stages)
            if source is not None and source.stage % ranks == rank:
                received.append(source)
            if target is not None and target.stage % ranks == rank:
                proven[target] = received
                received = []
    return proven
