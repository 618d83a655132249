"""Mesh, parallelisation, executor, checkpoints and the Lightning strategy."""
