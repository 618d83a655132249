"""Checkpoints as folders: written whole, read by any mesh, kept apart from the strategy."""
