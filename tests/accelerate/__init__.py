"""Accelerate and transformers.Trainer."""
