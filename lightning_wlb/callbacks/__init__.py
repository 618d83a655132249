"""What a run shows: imbalance per rank and level."""
