"""Tests of mics_strategy.recovery."""
