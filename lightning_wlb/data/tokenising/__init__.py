"""Texts and chats, through a tokenizer, to documents that a store opens: begin at ``run.py``."""
