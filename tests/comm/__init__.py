"""Tests of mics_strategy.collectives."""
