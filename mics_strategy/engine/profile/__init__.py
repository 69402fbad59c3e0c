"""Recording of what ranks really do in a few steps."""
