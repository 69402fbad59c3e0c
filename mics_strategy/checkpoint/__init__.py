"""Sharded checkpoints: atomic saves, verified loads, imports and exports."""
