"""What only a GPU can show; skipped elsewhere."""
