"""Collectives of ranks on one node that read one another's memory."""
