"""Text and images of the recipes: where they come from, how they are stored, which rank reads which."""
