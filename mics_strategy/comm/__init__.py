"""Process groups, communicators, codecs, and the only calls of torch.distributed."""
