"""Tests of mics_strategy.sharding."""
