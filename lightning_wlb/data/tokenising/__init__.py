"""Texts and chats, through a tokenizer, to documents that a store opens.

``TokeniseRequest`` says what is asked for, ``tokenise`` writes it to a folder; ``tokenised_texts``
and ``tokenised_chats`` do so once in the user's cache folder.
"""

from lightning_wlb.data.tokenising.run import (
    COLUMNS,
    Kind,
    TokeniseRequest,
    tokenise,
    tokenised_chats,
    tokenised_texts,
)

__all__ = ["COLUMNS", "Kind", "TokeniseRequest", "tokenise", "tokenised_chats", "tokenised_texts"]
