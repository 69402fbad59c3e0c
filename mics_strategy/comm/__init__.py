"""How bytes travel: groups, communicators, codecs, and the only calls of torch.distributed."""
