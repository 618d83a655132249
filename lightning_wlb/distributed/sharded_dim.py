"""Along which dimension FSDP2 shards a parameter; plain integers, so that planning can ask too.

The first dimension, as FSDP2 has it by default, unless it has fewer rows than there are ranks and
another one divides. A packed projection or a low-rank adapter has two rows: two ranks would hold
all of it, and the others nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


def sharded_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension that so many ranks shard.

    Args:
        shape: of the parameter, or of the tensor-parallel part of it that these ranks have.
        ranks: of the data and context axes together.
    """
    if not shape or shape[0] >= ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if size and size % ranks == 0), 0)
