"""How does any optimizer step on shards, as it would on the whole model?"""
