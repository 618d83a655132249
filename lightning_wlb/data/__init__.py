"""Documents and plans in, this rank's tensors out."""
