"""Lightning strategies for the Trainer and for Fabric, and a profiling callback.

Nothing is imported before it is used: importing this package does not import Lightning; naming `MiCSStrategy` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mics_strategy.version import install_advice

if TYPE_CHECKING:
    from mics_strategy.lightning.fabric import MiCSFabricStrategy, fabric_strategy_for
    from mics_strategy.lightning.profile import MiCSProfile, profile_callback_for
    from mics_strategy.lightning.strategy import MiCSStrategy, strategy_for

__all__ = [
    "MiCSFabricStrategy",
    "MiCSProfile",
    "MiCSStrategy",
    "fabric_strategy_for",
    "profile_callback_for",
    "strategy_for",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has {', '.join(__all__)}.")
    module = next((part for part in ("fabric", "profile") if part in name.lower()), "strategy")
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("lightning", "lightning.pytorch", "lightning.fabric"):
            raise
        raise ModuleNotFoundError(
            f"`{name}` needs Lightning, which is not installed. {install_advice('lightning')}", name=error.name
        ) from error
