"""Choice of the fastest sharding that fits into memory."""
