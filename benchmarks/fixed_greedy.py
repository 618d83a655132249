"""WLB-LLM's fixed-length packing ("Fixed-4D"), which other packings are compared with.

``fixed_greedy`` (WLB-LLM §3.2, §4.1) packs W global batches together into W·N micro-batches of at
most C tokens: pieces go in descending length to the micro-batch with the least attention work, the
sum of d², that has room. The last short pieces fit nowhere whole and are cut to fill the gaps. The
micro-batches are sorted by work and divided into W steps, so that micro-batches of similar work run
in the same step. Balance improves with W. The price is less random data, which the paper's Figure 6
shows in the loss, and a delay of (W - 1)/2 steps on average.

Cost for P pieces: O(P·(log P + W·N)) once every W steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_wlb.argument_checks import whole
from lightning_wlb.plan import Piece
from lightning_wlb.planning.dealing import longest_first
from lightning_wlb.planning.global_batches import GlobalBatches
from lightning_wlb.planning.packing.base import MicroBatches, Packer, PackingOptions, Rules


@dataclass(frozen=True)
class FixedGreedyOptions(PackingOptions):
    """Options of the method.

    Args:
        packing_window: W, global batches that are packed together.
    """

    decide_data: ClassVar[tuple[str, ...]] = ("packing_window",)

    packing_window: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "packing_window", whole("packing_window", self.packing_window, 1))


class FixedGreedyPacker(Packer):
    """Greedy packing of the windows of W global batches."""

    Options: ClassVar[type[PackingOptions]] = FixedGreedyOptions
    cuts_stream: ClassVar[bool] = True

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._ready: list[MicroBatches] = []  # steps packed and not yet run

    @property
    def held(self) -> list[Piece]:
        """Pieces of the steps to come, then carried ones."""
        ready = [piece for step in self._ready for pieces in step for piece in pieces]
        return ready + self.carried

    def reset(self) -> None:
        """Start an epoch, in which nothing is packed yet."""
        super().reset()
        self._ready = []

    def pack(self, pieces: list[Piece], bins: int) -> tuple[MicroBatches, list[Piece]]:
        """Micro-batches of at most C tokens; nothing is carried."""
        return pack_greedily(pieces, bins, self.rules.window), []

    def next_step(self, arrivals: GlobalBatches, step: int) -> tuple[MicroBatches, bool]:
        """The next step of the window, or the first of the next window."""
        most: int = self.rules.options.packing_window
        while not self._ready:
            pieces, batches = list(self.carried), 0
            while batches < most and (batch := arrivals.draw(step)) is not None:
                pieces += batch
                batches += 1
            if not batches:
                return super().next_step(arrivals, step)
            self.carried = []
            bins = batches * self.rules.micro_batches
            micro_batches = self._pack_in_time(pieces, step, bins, self.max_age)
            self._ready = self._steps(micro_batches, batches)
        return self._ready.pop(0), False

    def state_dict(self) -> dict[str, Any]:
        """Carried pieces, and the steps that are packed but not yet run."""
        ready = [[list(map(list, own)) for own in step] for step in self._ready]
        return {**super().state_dict(), "ready": ready}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        super().load_state_dict(state)
        self._ready = [[list(map(Piece._make, own)) for own in step] for step in state["ready"]]

    def _steps(self, micro_batches: MicroBatches, batches: int) -> list[MicroBatches]:
        """Group micro-batches of like work into at most ``batches`` steps, none empty."""
        work = self.rules.work.total
        filled = sorted(
            filter(None, micro_batches),
            key=lambda pieces: (-sum(work(piece.tokens) for piece in pieces), min(pieces)),
        )
        size = max(-(-len(micro_batches) // batches), 1)
        return [filled[first : first + size] for first in range(0, len(filled), size)]


def pack_greedily(pieces: Sequence[Piece], bins: int, window: int) -> MicroBatches:
    """Pack pieces into micro-batches of at most ``window`` tokens and equal attention work.

    Args:
        pieces: at most ``bins`` times ``window`` tokens together, each at most ``window``.
        bins: number of micro-batches.
        window: C, most tokens of a micro-batch.

    Equal lengths go by (document, origin), equal micro-batches by number. A piece that fits nowhere
    whole is cut, first for the micro-batch with the most room.
    """
    micro_batches: MicroBatches = [[] for _ in range(bins)]
    attention = [0] * bins
    room = [window] * bins
    for piece in longest_first(pieces):
        fitting = [index for index in range(bins) if room[index] >= piece.tokens]
        if fitting:
            parts = [(min(fitting, key=lambda index: (attention[index], index)), piece)]
        else:
            parts = _cut(piece, room)
        for index, part in parts:
            micro_batches[index].append(part)
            attention[index] += part.tokens**2
            room[index] -= part.tokens
    return micro_batches


def _cut(piece: Piece, room: Sequence[int]) -> list[tuple[int, Piece]]:
    """Cut a piece for the micro-batches with the most room; (micro-batch, part) of each part."""
    parts = []
    origin = piece.origin
    for index in sorted(range(len(room)), key=lambda index: (-room[index], index)):
        stop = min(origin + room[index], piece.stop)
        if stop == origin:
            break
        parts.append((index, Piece(piece.document, origin, stop, piece.arrival)))
        origin = stop
    assert origin == piece.stop, "more tokens than micro-batches hold"
    return parts


METHODS = {"fixed_greedy": FixedGreedyPacker}
"""Packings that are not the package's, by the names that results have."""
