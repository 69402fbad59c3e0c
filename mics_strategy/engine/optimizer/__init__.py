"""How torch optimizers step on sharded parameters."""
