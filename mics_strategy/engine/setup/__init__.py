"""Steps of `shard()`: validation, first values of parameters, guards."""
