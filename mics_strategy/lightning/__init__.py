"""What does Lightning call?

Nothing here is imported before it is used: naming `MiCSStrategy` imports Lightning, importing this package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mics_strategy.lightning.strategy import MiCSStrategy, strategy_for

__all__ = ["MiCSStrategy", "strategy_for"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has {', '.join(__all__)}.")
    from mics_strategy.lightning import strategy

    return getattr(strategy, name)
