"""The sharded-data-parallel engine."""
