"""Variable-length attention: kernels, and what context-parallel ranks exchange around them."""
