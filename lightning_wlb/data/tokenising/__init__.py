"""Texts and chats, through a tokenizer, to documents that a store opens; see ``tokenise.py``."""
