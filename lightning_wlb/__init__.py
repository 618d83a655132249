"""Workload-balanced long-context training for PyTorch Lightning."""
