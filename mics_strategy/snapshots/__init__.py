"""Snapshots of a training in host memory, from which a restarted job continues."""
