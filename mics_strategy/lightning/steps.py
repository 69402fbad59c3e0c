"""How does a step of a LightningModule reach the parameters?

`training_step` and its like bypass `forward`, where the engine gathers what belongs to the root. So a step runs in the
place of the module's forward: the engine's hooks fire around it, parameters are whole inside, and names and the module
itself stay as they are. The module's own forward, called by the step, then finds the hooks asleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class StepRunner:
    """Runs steps of one sharded LightningModule.

    Args:
        module: Before it is sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tables: tuple[Any, Any] = (module._forward_pre_hooks, module._forward_hooks)
        self._hooks: list[dict[int, Any]] = [{}, {}]

    @contextmanager
    def finding_hooks(self) -> Iterator[None]:
        """The module is sharded inside; the hooks that it gets are the engine's."""
        before = [set(table) for table in self._tables]
        yield
        self._hooks = [
            {k: table[k] for k in table if k not in old} for table, old in zip(self._tables, before, strict=True)
        ]

    def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``module.<method>(*args, **kwargs)`` with the root's parameters gathered."""
        with self._as_forward(method):
            return self._module(*args, **kwargs)

    @contextmanager
    def _as_forward(self, method: str) -> Iterator[None]:
        attributes = vars(self._module)
        own = {"forward": attributes["forward"]} if "forward" in attributes else {}

        def restore() -> None:
            attributes.pop("forward", None)
            attributes.update(own)

        def step(*args: Any, **kwargs: Any) -> Any:
            restore()  # the step itself may call the real forward
            with self._asleep():
                return getattr(self._module, method)(*args, **kwargs)

        attributes["forward"] = step
        try:
            yield
        finally:
            restore()

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """Take the root's hooks away; they have fired and would take what is whole for a replaced parameter."""
        for table, hooks in zip(self._tables, self._hooks, strict=True):
            for key in hooks:
                table.pop(key, None)
        try:
            yield
        finally:
            for table, hooks in zip(self._tables, self._hooks, strict=True):
                table.update(hooks)
                for key in reversed(hooks):
                    table.move_to_end(key, last=False)
