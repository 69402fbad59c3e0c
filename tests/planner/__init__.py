"""Tests of mics_strategy.planner."""
