"""One rank's pretended GPU: which memory is its own, what runs on which stream, and what the host waits for.

Values are computed at once, on the CPU, in the order of the program. What is checked is what streams and events
guarantee, which is less. `pretence` puts this in the place of `torch.cuda`.
"""

import bisect
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda_harness.allocations import (
    DEVICE,
    HOST_MEMORY,
    PINNED,
    Allocation,
    allocate,
    allocation_of,
    is_host_tensor,
    kind_of,
)
from tests.cuda_harness.happens_before import HOST, Clock, Memory, Orders, Range
from tests.cuda_harness.launch_order import Launch, Node
from tests.cuda_harness.operators import (
    GATHERS,
    LAUNCHES_NOTHING,
    WAITS_FOR_VALUES,
    num_kernels,
    numel_of,
    operands,
    ranges_of,
    signature_of,
    tensors_in,
)
from tests.cuda_harness.streams import Here, Stream, alone, as_thread, current_stream, here, source_line
from tests.cuda_harness.works import Works, group_of, is_async, work_of, written_and_read

_COPIES = frozenset(("copy_", "_to_copy", "clone", "_foreach_copy_"))
_ENGINE = "_engine_run_backward"  # torch's function that enters autograd's engine


class Machine:
    """A pretended GPU of one rank.

    Args:
        index: Of the device on which the model is.
        runs_hooks_apart: Whether autograd's hooks run in a thread of their own, as on a GPU.

    Attributes:
        waits: Where the host waited for the device, in a step.
        launches: Collectives, in the order of the host.
        log: Kernels, collectives and waits: what, stream of the launch, name, or number of the stream waited for.
    """

    def __init__(self, index: int = 0, *, runs_hooks_apart: bool = True) -> None:
        self.index = index
        self.device = torch.device("cuda", index)
        self.runs_hooks_apart = runs_hooks_apart
        self.orders = Orders()
        self.waits: list[str] = []
        self.launches: list[Launch] = []
        self.log: list[tuple[str, int, str]] = []
        self.step_number = 0
        self.time_ms = 0  # of timing events
        self._is_in_step = False
        self._defaults: dict[int, Stream] = {}
        self._nccl: dict[str, int] = {}  # streams of communicators
        self._counts: dict[str, int] = {}
        self._launched: dict[int, list[tuple[int, Node]]] = {}  # by stream
        self.works = Works(lambda end: self.orders.wait(current_stream().number, end))

    def __enter__(self) -> "Machine":
        """Be the GPU of this thread."""
        self._before = as_thread(Here(machine=self))
        self._before.__enter__()
        self._mode = Mode(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._before.__exit__(*error)

    @property
    def races(self) -> list[str]:
        """What no stream, event or reference orders, in words."""
        return self.orders.violations

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of training: the host may wait for nothing of it."""
        self.step_number += 1
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    def default_stream(self, index: int) -> Stream:
        """The default stream of a device."""
        if index not in self._defaults:
            made = Stream(index)
            self.orders.names[made.number] = "the default stream" + (f" of cuda:{index}" if index else "")
            self._defaults[index] = made
        return self._defaults[index]

    # -- the host --------------------------------------------------------------------------------------------

    def note_wait(self, reason: str) -> None:
        """The host waits here for what the device has to do."""
        line = f"{reason} at {source_line()}"
        if self._is_in_step and line not in self.waits:
            self.waits.append(line)

    def wait_on_host(self, stream: int, reason: str) -> None:
        """The host blocks until a stream has done everything."""
        self.note_wait(reason)
        self.orders.wait(HOST, self.orders.record(stream))

    def synchronize(self) -> None:
        """The host blocks until everything is done."""
        self.note_wait("synchronisation of the device")
        for stream in range(1, len(self.orders.names)):
            self.orders.wait(HOST, self.orders.record(stream))

    # -- operators -------------------------------------------------------------------------------------------

    def run(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Carry out an operator, and note what it does."""
        kwargs, kind = self._placed(kwargs)
        inputs = list(operands(operator, args, kwargs))
        if not all(is_host_tensor(t) for t, _ in inputs):
            return operator(*args, **kwargs)
        result = operator(*args, **kwargs)
        name = operator._schema.name.partition("::")[2]
        if signature_of(operator).is_view:
            return result
        on_device = [t for t, _ in inputs if kind_of(t) == DEVICE]
        kind = kind or (DEVICE if on_device else HOST_MEMORY)
        made = [t for t in tensors_in(result) if self._allocate(t, kind, inputs)]
        if name in LAUNCHES_NOTHING:
            return result
        uses = [*self._uses(inputs), *self._uses([(tensor, True) for tensor in made])]
        if not on_device and not (made and kind == DEVICE):
            self.orders.launch(HOST, uses, f"{name} at {source_line()}" if uses else name)
            return result
        flags = dict(zip(signature_of(operator).names, args, strict=False)) | kwargs
        is_non_blocking = here().is_non_blocking or bool(flags.get("non_blocking"))
        self._kernel(name, inputs, uses, kind, is_non_blocking)
        return result

    def _placed(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """The arguments as a CPU understands them, and the kind of memory that they ask for."""
        kind = here().kind
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs, kind = {**kwargs, "device": torch.device("cpu")}, kind or DEVICE
        elif device is not None and torch.device(device).type == "cpu" and self._is_called_by_autograd():
            kind = kind or DEVICE  # a formula's own: of the device of its gradient
        if kwargs.get("pin_memory"):
            kwargs, kind = {**kwargs, "pin_memory": False}, kind or PINNED
        return kwargs, kind

    @staticmethod
    def _is_called_by_autograd() -> bool:
        return sys._getframe(4).f_code.co_name == _ENGINE

    def _allocate(self, tensor: torch.Tensor, kind: str, inputs: list[tuple[torch.Tensor, bool]]) -> bool:
        """Whether a result is new memory, of a pretended kind; it belongs to the current stream then."""
        if kind == HOST_MEMORY or not is_host_tensor(tensor):
            return False
        if any(t.untyped_storage() is tensor.untyped_storage() for t, _ in inputs):
            return False
        if allocation_of(tensor) is not None:
            return False
        owner = current_stream(self.device).number
        memory = self.orders.allocate(owner) if kind == DEVICE else Memory(HOST)
        allocate(tensor, Allocation(self, kind, memory))
        return True

    @staticmethod
    def _uses(tensors: Iterable[tuple[torch.Tensor, bool]]) -> Iterator[tuple[Memory, Range, bool]]:
        for tensor, is_written in tensors:
            allocation = allocation_of(tensor)
            if allocation is not None:
                for range_ in ranges_of(tensor):
                    yield allocation.memory, range_, is_written

    def _kernel(
        self,
        name: str,
        inputs: list[tuple[torch.Tensor, bool]],
        uses: list[tuple[Memory, Range, bool]],
        kind: str,
        is_non_blocking: bool,
    ) -> None:
        """Something runs on the current stream; its result, where it has one, is memory of `kind`."""
        of_host = [t for t, _ in inputs if kind_of(t) != DEVICE]
        if name not in _COPIES and any(t.dim() for t in of_host):
            raise RuntimeError(f"Expected all tensors of {name} to be on the same device, at {source_line()}")
        stream = self._launch_kernel(name, uses, num_kernels(name, inputs))
        if name in WAITS_FOR_VALUES or (name.startswith(("index", "_index")) and _has_mask(inputs)):
            self.wait_on_host(stream, f"`{name}` of values on the device")
        elif name in _COPIES and _blocks(inputs, kind, is_non_blocking):
            self.wait_on_host(stream, f"blocking `{name}` between device and host")

    def _launch_kernel(self, name: str, uses: Iterable[tuple[Memory, Range, bool]], count: int = 1) -> int:
        stream = current_stream(self.device).number
        self.log += [("kernel", stream, name)] * count
        self.orders.launch(stream, uses, f"{name} at {source_line()}")
        return stream

    def kernel(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """A kernel that is no operator of torch runs on the current stream."""
        self._launch_kernel(name, self._uses([(t, False) for t in reads] + [(t, True) for t in writes]))

    # -- collectives -----------------------------------------------------------------------------------------

    def communicate(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Carry out an operator of c10d."""
        name = operator._schema.name.partition("::")[2]
        outs, ins = written_and_read(name, args)
        result = operator(*args, **kwargs)
        if any(kind_of(tensor) == DEVICE for tensor in (*outs, *ins)):
            self.follow(work_of(result), name, group_of(args), outs, ins, is_async(operator, args, kwargs))
        return result

    def communicate_functionally(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Carry out an operator of `torch.ops._c10d_functional`, whose result stands for its work."""
        with alone():
            result = operator(*args, **kwargs)
        name = operator._schema.name.partition("::")[2]
        ins = [tensor for tensor in tensors_in(args) if kind_of(tensor) == DEVICE]
        if not ins:
            return result
        if name == "wait_tensor":
            self.works.waited_for(args[0].untyped_storage())
            return result
        outs = tensors_in(result)
        for tensor in outs:
            self._allocate(tensor, DEVICE, [])
        end = self.launch(name, dist.distributed_c10d._resolve_process_group(args[-1]), outs, ins, is_async=True)
        for tensor in outs:
            self.works.add(tensor.untyped_storage(), end, [])
        return result

    def follow(
        self, work: Any, name: str, group: Any, outs: list[torch.Tensor], ins: list[torch.Tensor], is_async: bool
    ) -> None:
        """A collective has been launched: who waits for `work` lets the current stream wait for its end."""
        end = self.launch(name, group, outs, ins, is_async)
        self.works.add(work, end, [*outs, *ins])

    def launch(self, name: str, group: Any, outs: list[torch.Tensor], ins: list[torch.Tensor], is_async: bool) -> Clock:
        """A collective on the stream of its communicator, behind the current one. Returns when it ends."""
        current, key = current_stream(self.device).number, group.group_name
        stream = self._nccl.get(key) if is_async else current
        if stream is None:
            stream = self._nccl[key] = self.orders.stream(f"NCCL's stream of {group.group_desc}")
        self.log.append(("collective", current, f"{group.group_desc} {name}"))
        self.orders.wait(stream, self.orders.record(current))
        clock = self.orders.record(stream)
        behind = [_last(launched, clock.get(other, 0)) for other, launched in self._launched.items()]
        reads, writes = (list(self._uses((t, side is outs) for t in side)) for side in (ins, outs))
        if name in GATHERS:  # in place: NCCL leaves alone what each rank already has where it belongs
            writes = [(memory, rest, True) for memory, range_, _ in writes for rest in _without(memory, range_, reads)]
        tick = self.orders.launch(stream, [*reads, *writes], f"{name} of {group.group_desc} at {source_line()}")
        number = self._counts[key] = self._counts.get(key, 0) + 1
        node = ((f"{group.group_desc} ({key})", tuple(dist.get_process_group_ranks(group))), number)
        self._launched.setdefault(stream, []).append((tick, node))
        what = f"{name} {numel_of(outs)} of {numel_of(ins)}"
        self.launches.append(Launch(node, what, tuple(each for each in behind if each is not None)))
        return self.orders.record(stream)


def _last(launched: list[tuple[int, Node]], tick: int) -> Node | None:
    """The last of the collectives of a stream that had been launched by `tick`."""
    count = bisect.bisect_right(launched, tick, key=lambda each: each[0])
    return launched[count - 1][1] if count else None


def _without(memory: Memory, range_: Range, reads: list[tuple[Memory, Range, bool]]) -> list[Range]:
    """What is left of a range without those of `reads` that lie in it."""
    left = [range_]
    for other, (first, last), _ in reads:
        if other is memory:
            left = [
                part
                for start, end in left
                for part in ((start, min(end, max(first, start))), (max(start, min(last, end)), end))
                if part[0] < part[1]
            ]
    return left


def _has_mask(inputs: list[tuple[torch.Tensor, bool]]) -> bool:
    return any(t.dtype in (torch.bool, torch.uint8) for t, _ in itertools.islice(inputs, 1, None))


def _blocks(inputs: list[tuple[torch.Tensor, bool]], made: str, is_non_blocking: bool) -> bool:
    """Whether the host waits in a copy, as `cudaMemcpyAsync` and torch's synchronisation after it say.

    Of memory that is not pinned it makes a copy of its own first, so the host may wait whatever the caller says.

    Args:
        inputs: Of the copy, with what it writes where that is not new.
        made: Where the copy is, where it is new.
        is_non_blocking: As the caller of the copy says.
    """
    written = [kind_of(t) for t, is_written in inputs if is_written] or [made]
    read = [kind_of(t) for t, is_written in inputs if not is_written]
    crosses = any(one != other and DEVICE in (one, other) for one, other in zip(written, read, strict=False))
    return crosses and (not is_non_blocking or HOST_MEMORY in (*written, *read))


class Mode(TorchDispatchMode):
    """Hands every operator below autograd to a machine. Modes belong to threads, so each thread has its own."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether Dynamo compiles in this mode, which sees the operators of what is compiled (torch >= 2.13)."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # they call the operator on the tensors inside of them, which come here
        if func.namespace == "c10d":
            return self._machine.communicate(func, args, kwargs or {})
        if func.namespace == "_c10d_functional" and not func._schema.name.endswith("_wrap_tensor_autograd"):
            return self._machine.communicate_functionally(func, args, kwargs or {})
        return self._machine.run(func, args, kwargs or {})
