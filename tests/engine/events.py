"""Order of events: collectives started and waited for, units computed.

Spies record them. Nothing is replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mics_strategy.comm.communicator import Communicator
from mics_strategy.comm.work import Work


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
    originals = {name: getattr(Communicator, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    wait = Work.wait
    labels: dict[int, str] = {}

    def spied_wait(handle: Work) -> None:
        label = labels.pop(id(handle), None)
        wait(handle)
        if label is not None:
            events.append(f"wait {label}")

    def spy(original, kind: str):
        def started(self, *args, **kwargs):
            label = f"{kind} {next(arg for arg in args if isinstance(arg, str))}"
            events.append(f"start {label}")
            handle = original(self, *args, **kwargs)
            labels[id(handle)] = label
            return handle

        return started

    for kind, original in originals.items():
        setattr(Communicator, kind, spy(original, kind))
    Work.wait = spied_wait
    try:
        yield events
    finally:
        Work.wait = wait
        for kind, original in originals.items():
            setattr(Communicator, kind, original)
        for hook in hooks:
            hook.remove()


def _forward(events: list[str], name: str):
    return lambda *_: events.append(f"forward {name}")


def _backward(events: list[str], name: str):
    return lambda *_: events.append(f"backward {name}")
