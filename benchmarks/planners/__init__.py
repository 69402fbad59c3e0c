"""The planner beside public training runs of other groups, with every row's error: `python -m benchmarks.planners`."""
