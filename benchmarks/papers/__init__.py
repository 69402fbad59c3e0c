"""Published results, and what is assumed about the systems that gave them."""
