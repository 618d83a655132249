"""Variable-length attention, its sharding and its context parallelism."""
