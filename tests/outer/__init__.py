"""Tests of mics_strategy.comm."""
