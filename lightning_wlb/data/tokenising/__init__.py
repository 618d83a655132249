"""Texts and chats, through a tokenizer, to documents that a store opens.

``TokeniseRequest`` says what is asked for, ``tokenise`` writes it to a folder; ``texts`` and
``chats`` do so once in the user's cache folder.
"""

from lightning_wlb.data.tokenising.direct import chats, texts
from lightning_wlb.data.tokenising.job import COLUMNS, Kind, TokeniseRequest, tokenise

__all__ = ["COLUMNS", "Kind", "TokeniseRequest", "chats", "texts", "tokenise"]
