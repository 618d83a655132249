"""Which pipelines a step takes, their plans, and their parameters' exchanges; without torch."""
