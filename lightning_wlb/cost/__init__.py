"""What work costs: the one cost model of planning, simulation and report."""
