"""The planner in training loops other than Lightning's: one function, one file for each library."""
