"""Tokenises texts and chats into documents that a store opens; see ``tokenise.py``."""
