"""Measurements for `auto` settings, and the cache of their results."""
