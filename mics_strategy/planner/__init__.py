"""Which sharding is the fastest that fits."""
