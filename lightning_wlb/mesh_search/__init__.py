"""The search for the fastest mesh of a run."""
