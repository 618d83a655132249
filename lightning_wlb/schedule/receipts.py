"""When a rank knows that a message it sent has been received, from the programs alone.

A neighbour sends the message of an action after it has received what that action needed. So when
that message arrives, a rank can free the buffers of everything it had sent for it, without asking
and without waiting; otherwise it would hold every message until the end of the step. Messages that
no answer follows (of the pipeline's last backwards, one for each forward of the warm-up) are held
until then.

Linear in the actions of two neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_wlb.schedule.actions import Action, source_of, target_of


def receipts(
    programs: Mapping[int, Sequence[Action]], rank: int, ranks: int, stages: int
) -> dict[Action, list[Action]]:
    """Which messages of a rank have certainly been received when an action's own has arrived.

    Args:
        programs: by rank, of at least the neighbours of ``rank`` in the ring of ranks.
        rank: the rank that sent the messages.
        ranks: number of ranks of the pipeline.
        stages: number of stages over all ranks.

    Returns:
        For actions of the rank that receive a message from another rank: those of its actions
        whose messages the sender had received before it sent this one. Each is listed once, in
        the order in which they were received.
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
