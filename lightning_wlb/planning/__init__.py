"""Document lengths in, step plans out: pure, deterministic, without tensors."""
