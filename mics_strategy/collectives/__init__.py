"""How numbers travel between ranks."""
