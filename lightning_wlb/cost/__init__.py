"""The cost model that planning, simulation and reports share."""
