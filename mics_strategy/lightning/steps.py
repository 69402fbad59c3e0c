"""How does a step of a LightningModule reach the parameters?

`training_step` and its like bypass `forward`, where the engine gathers what belongs to the root. So a step runs in
the place of the module's forward: hooks fire, parameters are whole inside, names and the module itself stay as they
are.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def run_as_forward(module: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``module.<method>(*args, **kwargs)`` with the root's parameters gathered.

    Args:
        module: A sharded LightningModule.
        method: Name of the step.
        args: Of the step.
        kwargs: Of the step.
    """
    attributes = vars(module)
    own = {"forward": attributes["forward"]} if "forward" in attributes else {}

    def restore() -> None:
        attributes.pop("forward", None)
        attributes.update(own)

    def step(*step_args: Any, **step_kwargs: Any) -> Any:
        restore()  # the step itself may call the real forward
        return getattr(module, method)(*step_args, **step_kwargs)

    attributes["forward"] = step
    try:
        return module(*args, **kwargs)
    finally:
        restore()
