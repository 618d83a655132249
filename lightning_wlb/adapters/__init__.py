"""The planner in loops that are not Lightning's: one function, and one file for each peer."""
