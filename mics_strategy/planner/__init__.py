"""Choice of the fastest sharding that fits into memory, and simulation of a step.

The planner needs no process group and no device. It shares only pure files with the engine. Nothing is imported before
it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mics_strategy.planner.choice import Choice, SimulatedStep, plan, simulate
    from mics_strategy.planner.cluster import Cluster
    from mics_strategy.planner.space import Space
    from mics_strategy.planner.workload import Workload

__all__ = ["Choice", "Cluster", "SimulatedStep", "Space", "Workload", "plan", "simulate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has {', '.join(__all__)}.")
    module = name.lower() if name in ("Cluster", "Space", "Workload") else "choice"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
