"""Variable-length attention: kernels, and the exchanges of context-parallel ranks around them."""
