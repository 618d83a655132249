"""Mesh, parallelisation, executor and the Lightning strategy."""
