"""Which pipelines a step takes, what they do, and what moves to them; plain numbers, no torch."""
