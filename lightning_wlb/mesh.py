"""Placeholder while merging."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    data: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    virtual_stages: int = 1
