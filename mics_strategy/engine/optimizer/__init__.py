"""Steps of torch optimizers on sharded parameters."""
