"""Training that goes on without the ranks that died."""
