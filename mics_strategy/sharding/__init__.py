"""The engine: a model whose parameters, gradients and optimizer states live in shards."""
