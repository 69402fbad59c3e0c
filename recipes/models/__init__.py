"""The networks that recipes train: their numbers, their modules, their cost."""
