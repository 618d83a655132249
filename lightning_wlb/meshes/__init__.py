"""Which mesh a run should have: every legal one enumerated, most pruned, the rest simulated."""
