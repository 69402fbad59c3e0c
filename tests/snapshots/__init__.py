"""Tests of mics_strategy.snapshots."""
