"""What does it mean to wait for a collective of NCCL?

The current stream waits for the end, the host does not; until then NCCL's stash keeps the tensors from being freed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.cuda_harness.operators import COLLECTIVES, signature_of, tensors_in


class Works:
    """Works of one machine's collectives, by the objects that torch gives for them; ranks that are threads share some.

    Args:
        wait: Called with the end of a collective by who waits for it.
    """

    def __init__(self, wait: Callable[[Any], None]) -> None:
        self._wait = wait
        self._works: dict[int, tuple[Any, Any, list[torch.Tensor]]] = {}

    def add(self, work: Any, end: Any, stash: list[torch.Tensor]) -> None:
        """A collective is in flight; NCCL's stash keeps its tensors until a caller has waited."""
        self._works[id(work)] = work, end, stash

    def waited_for(self, work: Any) -> None:
        """A caller waits for `work`."""
        _, end, stash = self._works.get(id(work), (None, None, []))
        if end is not None:
            self._wait(end)
        stash.clear()

    @property
    def num_in_flight(self) -> int:
        """Collectives that no caller has waited for."""
        return sum(bool(stash) for _, _, stash in self._works.values())


@contextmanager
def watched(works_here: Callable[[], Works | None]) -> Iterator[None]:
    """Tell the works of the thread's machine when a caller waits."""
    with ExitStack() as stack:
        for kind in (dist.Work, *dist.Work.__subclasses__()):
            if "wait" in vars(kind):
                original = vars(kind)["wait"]
                stack.enter_context(mock.patch.object(kind, "wait", _waiting(original, works_here)))
        yield


def _waiting(original: Any, works_here: Callable[[], Works | None]) -> Callable[..., Any]:
    def wait(work: Any, *args: Any) -> Any:
        works = works_here()
        if works is not None:
            works.waited_for(work)
        return original.__get__(work)(*args)

    return wait


def group_of(args: tuple) -> Any:
    """The process group of an operator of c10d."""
    return next(dist.ProcessGroup.unbox(argument) for argument in args if isinstance(argument, torch.ScriptObject))


def work_of(result: Any) -> Any:
    """The work that an operator of c10d has given."""
    leaves = result if isinstance(result, (tuple, list)) else [result]
    return next(dist.Work.unbox(leaf) for leaf in leaves if isinstance(leaf, torch.ScriptObject))


def is_async(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a collective runs on a stream of its communicator: else on the current one."""
    arguments = dict(zip(signature_of(operator).names, args, strict=False)) | kwargs
    return bool(arguments.get("async_op", arguments.get("asyncOp", True)))


def written_and_read(name: str, args: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors of a collective."""
    out, full = COLLECTIVES[name]
    return tensors_in(args[out]), tensors_in(args[full])
