"""The two ends of a Hugging Face decoder: token embedding, and norm with output projection.

Under tensor parallelism the embedding's rows (words) lie on the ranks; each looks up its own words
and the sum is scattered by rows. The head's logits are split by words and never gathered.

Most families' head is a plain matrix. Its loss is :func:`~.loss.token_loss`. Others scale or cap
the logits or add a bias; there the family's own code makes the logits of a chunk of rows at a time,
which backward makes again. :func:`is_plain` finds out which it is by running the family's code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_wlb.distributed.process_groups import group_rank, group_size
from lightning_wlb.models.huggingface.attention import recomputed, running
from lightning_wlb.models.loss import chunks, logits_loss, token_loss
from lightning_wlb.models.tensor_parallel import gather_rows, local, scatter_rows


class Embedding(nn.Module):
    """A family's token embedding, whose words may lie on several ranks.

    transformers gives its padding token's row no gradient from here, on any number of ranks.
    """

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words
        self._padding = words.padding_idx

    def forward(self, tokens: Tensor, group: ProcessGroup | None) -> Tensor:
        """int64 [P] -> [P/TP, dim]."""
        if group_size(group) == 1:
            rows: Tensor = self.words(tokens)
            return rows
        own = self.words.weight.shape[0]
        first = group_rank(group) * own
        column = tokens - first
        elsewhere = (column < 0) | (column >= own)
        if self._padding is not None:
            # By number among this rank's words, which its module looks up.
            here = first <= self._padding < first + own
            self.words.padding_idx = self._padding - first if here else None
        rows = self.words(column.masked_fill(elsewhere, 0))
        return scatter_rows(rows.masked_fill(elsewhere[:, None], 0), group)


class Head(nn.Module):
    """Final norm, output projection, and whatever the family does to logits behind it.

    Args:
        norm: the base model's last norm.
        projection: the output projection.
        causal: the ``ForCausalLM`` that holds the projection, its base model replaced by
            :class:`.GivenHidden`. It is not registered as a part.
    """

    def __init__(self, norm: nn.Module, projection: nn.Linear, causal: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.projection = projection
        self._causal = (causal,)
        self.plain = is_plain(causal, projection)

    def forward(self, hidden: Tensor, labels: Tensor | None, group: ProcessGroup | None) -> Tensor:
        """[P/TP, dim] -> the sum of token losses; logits [P, vocabulary/TP] without labels."""
        hidden = gather_rows(self.norm(hidden[None])[0], group)
        if labels is None:
            return self.logits(hidden)
        if self.plain:
            return token_loss(hidden, local(self.projection.weight), labels, group)
        # Zero, and tied to the hidden states also where there is no row.
        total = hidden[:0].sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
        # What a family does to logits takes about as much memory again as the plain loss.
        for chunk in chunks(hidden.shape[0], local(self.projection.weight), times=2):
            total = total + recomputed(self._loss)(hidden[chunk], labels[chunk])
        return total

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, dim] behind the norm -> [rows, vocabulary/TP], by the family's own code."""
        logits: Tensor = self._causal[0](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        run = running()
        assert run is not None
        return logits_loss(self.logits(hidden), labels, run.groups.tensor)


def is_plain(causal: nn.Module, projection: nn.Module) -> bool:
    """Whether a family's logits are a matrix times the hidden states and nothing else.

    The family's own code is run with a projection that gives out a tensor of ours: plain is what
    hands the hidden states to it as they are, and hands that tensor on as the logits.
    """
    if type(projection).forward is not nn.Linear.forward or projection.bias is not None:
        return False
    hidden = torch.arange(4, device="cpu", dtype=torch.float32).view(1, 1, 4)
    logits = torch.arange(3, device="cpu", dtype=torch.float32).view(1, 1, 3)
    seen: list[Tensor] = []

    def given(x: Tensor) -> Tensor:
        seen.append(x)
        return logits

    projection.forward = given
    try:
        out = causal(inputs_embeds=hidden, use_cache=False).logits
    finally:
        del projection.forward
    (came,) = seen
    return torch.equal(came, hidden) and torch.equal(out, logits)
