"""Tests of mics_strategy.engine.optimizer."""
