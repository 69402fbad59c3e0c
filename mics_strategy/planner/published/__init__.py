"""Published results, and what the planner assumes about the systems that gave them."""
