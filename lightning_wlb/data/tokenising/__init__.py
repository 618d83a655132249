"""Texts and chats, through a tokenizer, to documents that a store opens.

``TokeniseRequest`` says what is asked for, ``tokenise`` writes it to a folder, ``tokenised_once``
to one in the user's cache.
"""

from lightning_wlb.data.tokenising.run import (
    COLUMNS,
    Kind,
    TokeniseRequest,
    tokenise,
    tokenised_once,
)

__all__ = ["COLUMNS", "Kind", "TokeniseRequest", "tokenise", "tokenised_once"]
