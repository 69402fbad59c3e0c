"""What happens once, when a model is sharded: checks, first values, guards."""
