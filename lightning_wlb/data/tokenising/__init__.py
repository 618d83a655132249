"""Texts and chats, through a tokenizer, to documents that a store opens.

:class:`Request` says what is asked for, :func:`tokenise` writes it to a folder, and
:func:`tokenised` does so once in the user's cache folder for a specification of texts or chats.
"""

from lightning_wlb.data.tokenising.direct import is_texts, tokenised
from lightning_wlb.data.tokenising.job import COLUMNS, Kind, Request, tokenise

__all__ = ["COLUMNS", "Kind", "Request", "is_texts", "tokenise", "tokenised"]
