"""What happened in which order: collectives started and waited for, units computed. Spies; nothing is replaced."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mics_strategy.collectives.collective import Collective
from mics_strategy.collectives.ops import Handle


@contextmanager
def recorded(model: nn.Module, units: type[nn.Module]) -> Iterator[list[str]]:
    """Events of the model inside the context.

    ``start KIND UNIT`` and ``wait KIND UNIT`` for collectives, ``forward UNIT`` when a unit's forward has ended,
    ``backward UNIT`` when the gradient of its input is known.
    """
    events: list[str] = []
    names = {module: name for name, module in model.named_modules() if isinstance(module, units)}
    hooks = [module.register_forward_hook(_forward(events, name)) for module, name in names.items()]
    hooks += [module.register_full_backward_hook(_backward(events, name)) for module, name in names.items()]
    originals = {name: getattr(Collective, name) for name in ("gather", "gather_apart", "reduce", "all_reduce")}
    wait = Handle.wait
    labels: dict[int, str] = {}

    def spied_wait(handle: Handle) -> None:
        label = labels.pop(id(handle), None)
        wait(handle)
        if label is not None:
            events.append(f"wait {label}")

    def spy(kind: str):
        def started(self, *args, **kwargs):
            label = f"{kind.removesuffix('_apart')} {args[-1]}"
            events.append(f"start {label}")
            handle = originals[kind](self, *args, **kwargs)
            labels[id(handle)] = label
            return handle

        return started

    for kind in originals:
        setattr(Collective, kind, spy(kind))
    Handle.wait = spied_wait
    try:
        yield events
    finally:
        Handle.wait = wait
        for kind, original in originals.items():
            setattr(Collective, kind, original)
        for hook in hooks:
            hook.remove()


def _forward(events: list[str], name: str):
    return lambda *_: events.append(f"forward {name}")


def _backward(events: list[str], name: str):
    return lambda *_: events.append(f"backward {name}")
