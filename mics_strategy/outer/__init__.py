"""Outer steps: islands of ranks step alone, and average what their parameters have changed by (see `islands`)."""
