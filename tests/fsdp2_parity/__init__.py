"""Scenarios of PyTorch's own tests of FSDP2, trained by `shard()` and by plain processes."""
