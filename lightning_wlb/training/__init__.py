"""How a rank runs a step: executor, messages, parameter buckets, precision."""
