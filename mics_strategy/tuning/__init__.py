"""What `auto` measures: thresholds and launches, and the cache that keeps the results."""
