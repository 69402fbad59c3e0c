"""Measurements of the engine beside its peers, on nodes with slow links between them."""
