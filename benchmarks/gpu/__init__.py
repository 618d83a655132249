"""What to run in an hour on one GPU: ``python -m benchmarks.gpu``, see its ``--help``."""
