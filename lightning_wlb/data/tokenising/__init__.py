"""Texts and chats, through a tokenizer, to documents that a store opens.

:class:`Request` says what is asked for, :func:`tokenise` writes it to a folder; :func:`texts` and
:func:`chats` do so once in the user's cache folder.
"""

from lightning_wlb.data.tokenising.direct import chats, texts
from lightning_wlb.data.tokenising.job import COLUMNS, Kind, Request, tokenise

__all__ = ["COLUMNS", "Kind", "Request", "chats", "texts", "tokenise"]
