"""How do gradients get from autograd into the shards?"""
