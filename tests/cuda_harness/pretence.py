"""In the place of `torch.cuda`, of tensors' devices and of autograd's device thread: what a `Machine` says.

Only threads with a machine see it, so ranks that are threads have one each, and others none.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo import convert_frame
from torch.utils._device import _device_constructors

from mics_strategy.comm.codecs import quantizer
from mics_strategy.engine import bucket, parameter, storage_guard
from mics_strategy.engine.rank_agreement import ReplicaCheck
from tests.cuda_harness import kernels
from tests.cuda_harness.allocations import DEVICE, HOST_MEMORY, PINNED, allocate, allocation_of, kind_of, real_device
from tests.cuda_harness.machine import Mode
from tests.cuda_harness.streams import Event, Stream, alone, as_thread, current_stream, here, index_of, machine
from tests.cuda_harness.works import Works, watched

NUM_DEVICES = 2
_MEMORY_BYTES = 80 * 10**9
_CPU = torch.device("cpu")
_NOT_CAPTURING = SimpleNamespace(is_capturing=lambda: False)


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """Pretend a CUDA build of torch, to threads that are in a `Machine`."""
    _device_constructors()  # torch keeps this set of its functions: without those of the pretence
    with ExitStack() as stack:
        of_torch = _factories(torch, _FACTORIES) | _copies_to_device()
        of_tensors = _factories(torch.Tensor, _METHODS) | _tensor()
        for owner, fakes in ((torch.cuda, _cuda()), (torch.Tensor, of_tensors), (torch, of_torch)):
            for name, fake in fakes.items():
                stack.enter_context(mock.patch.object(owner, name, _or_original(fake, getattr(owner, name))))
        for name, fake in (("device", _device), ("is_cuda", _is_cuda), ("is_cpu", _is_cpu)):
            stack.enter_context(mock.patch.object(torch.Tensor, name, _named(name, fake)))
        stack.enter_context(mock.patch.object(torch.cuda, "Stream", Stream))
        stack.enter_context(mock.patch.object(torch.cuda, "Event", Event))
        stack.enter_context(mock.patch.object(torch.cuda, "device", _UseDevice))
        capturing = _or_original(lambda device=None: _NOT_CAPTURING, torch.accelerator.current_stream)  # torch >= 2.14
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", capturing))
        cast = torch.amp.autocast_mode.autocast
        stack.enter_context(mock.patch.object(cast, "__init__", _autocast(cast.__init__)))
        compiled = _compiled(convert_frame._compile)
        stack.enter_context(mock.patch.object(convert_frame, "_compile", compiled))
        grouped = _grouped(torch._C._group_tensors_by_device_and_dtype)
        stack.enter_context(mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped))
        there = _or_original(lambda: True, torch.accelerator.is_available)
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", there))
        for name, fake in (("range_start", lambda _: 1), ("range_end", lambda _: None)):
            stack.enter_context(
                mock.patch.object(torch.cuda.nvtx, name, _or_original(fake, getattr(torch.cuda.nvtx, name)))
            )
        generators = tuple(torch.Generator() for _ in range(NUM_DEVICES))
        stack.enter_context(mock.patch.object(torch.cuda, "default_generators", generators))
        stack.enter_context(mock.patch.object(torch.autograd, "backward", _backward(torch.autograd.backward)))
        stack.enter_context(mock.patch.object(dist, "get_backend", _backend(dist.get_backend)))
        own_storage = storage_guard.with_own_storage
        for user, fake in (
            (parameter, lambda view: view.data),  # a slice of its storage would not be marked
            (bucket, lambda view: view.data),
            (storage_guard, _own_storage),
        ):
            stack.enter_context(mock.patch.object(user, "with_own_storage", _or_original(fake, own_storage)))
        stack.enter_context(mock.patch.object(quantizer, "load_kernels", kernels.loader(quantizer.load_kernels)))
        stack.enter_context(watched(_works_here))
        yield


class _Property(property):
    """Has a name, as the attributes of tensors have."""


def _named(name: str, fake: Callable[[Any], Any]) -> property:
    named = _Property(fake)
    named.__name__ = name
    return named


def _own_storage(view: torch.Tensor) -> torch.Tensor:
    """As `storage_guard.with_own_storage`, marked as the memory that it is, all of it: places are compared in it."""
    storage: Any = view.untyped_storage()[:]
    alias = torch.empty(0, dtype=view.dtype).set_(storage, view.storage_offset(), view.shape, view.stride())
    allocation = allocation_of(view)
    if allocation is not None:
        allocate(alias, allocation)
    return alias


def _autocast(original: Callable[..., None]) -> Callable[..., None]:
    """Cast on the CPU, where values are computed, as a GPU would."""

    def on_cpu(context: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(context, device_type, dtype, *args, **kwargs)

    return _or_original(on_cpu, original)


def _compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo traces with fake tensors, which C++ refuses to put on a device that is not there."""

    def compile_on_cpu(*args: Any, **kwargs: Any) -> Any:
        with alone():
            return original(*args, **kwargs)

    return compile_on_cpu


def _grouped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Group tensors by the devices on which they pretend to be."""

    def by_device(lists: list[list[Any]], with_indices: bool = False) -> Any:
        groups = {}
        for (device, dtype), (tensors, indices) in original(lists, with_indices).items():
            first = next((tensor for tensor in tensors[0] if tensor is not None), None)
            groups[device if first is None else first.device, dtype] = tensors, indices
        return groups

    return _or_original(by_device, original)


def _works_here() -> Works | None:
    of_thread = here().machine
    return None if of_thread is None else of_thread.works


def _or_original(fake: Callable[..., Any], original: Any) -> Callable[..., Any]:
    @functools.wraps(fake)
    def either(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if here().machine is None else fake(*args, **kwargs)

    return either


# -- torch.cuda ---------------------------------------------------------------------------------------------


def _cuda() -> dict[str, Callable[..., Any]]:
    return {
        "_lazy_init": lambda: None,
        "current_device": lambda: here().device_index,
        "current_stream": current_stream,
        "default_stream": lambda device=None: machine().default_stream(index_of(device)),
        "device_count": lambda: NUM_DEVICES,
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "get_device_name": lambda device=None: "pretended",
        "get_device_properties": lambda device=None: SimpleNamespace(
            total_memory=_MEMORY_BYTES, name="pretended", major=9, minor=0
        ),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "manual_seed_all": lambda seed: None,
        "mem_get_info": lambda device=None: (_MEMORY_BYTES, _MEMORY_BYTES),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "set_device": _set_device,
        "set_rng_state": lambda state, device=None: None,
        "set_stream": lambda stream: here().streams.__setitem__(stream.device_index, stream),
        "stream": _use_stream,
        "synchronize": lambda device=None: machine().synchronize(),
    }


def _set_device(device: Any) -> None:
    here().device_index = index_of(device)


class _UseDevice:
    """In the place of `torch.cuda.device`, of which torch asks `isinstance`."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)

    def __enter__(self) -> None:
        self._before, here().device_index = here().device_index, self._index

    def __exit__(self, *_: object) -> None:
        here().device_index = self._before


@contextmanager
def _use_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    now, index = here(), stream.device_index
    before = now.streams.get(index)
    now.streams[index] = stream
    try:
        with _UseDevice(index):
            yield
    finally:
        now.streams.pop(index)
        if before is not None:
            now.streams[index] = before


# -- tensors ------------------------------------------------------------------------------------------------


def _device(tensor: torch.Tensor) -> torch.device:
    found = real_device.__get__(tensor)
    if found.type != "cpu" or here().machine is None:
        return found
    allocation = allocation_of(tensor)
    return allocation.machine.device if allocation is not None and allocation.kind == DEVICE else found


def _is_cuda(tensor: torch.Tensor) -> bool:
    return _device(tensor).type == "cuda"


def _is_cpu(tensor: torch.Tensor) -> bool:
    return _device(tensor).type == "cpu"


def _tensor() -> dict[str, Callable[..., Any]]:
    to, numpy, tolist, deepcopy = torch.Tensor.to, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__deepcopy__

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target, args, kwargs = _device_argument(args, kwargs)
        if target is None or real_device.__get__(tensor).type != "cpu":
            return to(tensor, *args, **(kwargs if target is None else {**kwargs, "device": target}))
        if target.type not in ("cuda", "cpu"):
            return to(tensor, target, *args, **kwargs)
        kind = DEVICE if target.type == "cuda" else HOST_MEMORY
        is_there = (kind_of(tensor) == DEVICE) == (kind == DEVICE)
        if not is_there:
            tensor = _copied(tensor, kind, is_non_blocking=bool(kwargs.get("non_blocking")))
            kwargs = {**kwargs, "copy": False}
        return to(tensor, *args, **kwargs)

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        return _copied(tensor, HOST_MEMORY) if kind_of(tensor) == DEVICE else tensor

    return {
        "to": moved,
        "cpu": lambda tensor, **_: moved(tensor, _CPU),
        "cuda": lambda tensor, device=None, non_blocking=False, **_: moved(
            tensor, torch.device("cuda", index_of(device)), non_blocking=non_blocking
        ),
        "is_pinned": lambda tensor, *_: kind_of(tensor) == PINNED,
        "numpy": lambda tensor, **kwargs: numpy(tensor, **kwargs),
        "pin_memory": lambda tensor, *_: _copied(tensor, PINNED),
        "tolist": lambda tensor: tolist(on_host(tensor.detach())),
        "__deepcopy__": deepcopy,
        "record_stream": lambda tensor, stream: None,
    }


def _device_argument(args: tuple, kwargs: dict[str, Any]) -> tuple[torch.device | None, tuple, dict[str, Any]]:
    """The device that the arguments of `to` name, and the arguments without it."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device, (args[0].dtype, *args[1:]), kwargs
    if args and isinstance(args[0], (str, torch.device, int)):
        device = torch.device("cuda", args[0]) if isinstance(args[0], int) else torch.device(args[0])
        return device, args[1:], kwargs
    rest = {name: value for name, value in kwargs.items() if name != "device"}
    device = kwargs.get("device")
    return None if device is None else torch.device(device), args, rest


def _copied(tensor: torch.Tensor, kind: str, *, is_non_blocking: bool = False) -> torch.Tensor:
    now = here()
    before = now.kind, now.is_non_blocking
    now.kind, now.is_non_blocking = kind, is_non_blocking
    try:
        return tensor.clone()
    finally:
        now.kind, now.is_non_blocking = before


_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
)
_FACTORIES += ("rand", "rand_like", "randint", "randn", "randn_like", "randperm", "zeros", "zeros_like")
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")


def _factories(owner: Any, names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    """Those that make memory where they are asked to, without asking a driver."""
    return {name: _placed(getattr(owner, name)) for name in names}


def _placed(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        on_device = device is not None and torch.device(device).type == "cuda"
        now = here()
        before = now.kind
        now.kind = DEVICE if on_device else PINNED if pin_memory else before
        try:
            return factory(*args, device=_CPU if on_device else device, **kwargs)
        finally:
            now.kind = before

    return make


def _copies_to_device() -> dict[str, Callable[..., Any]]:
    return {name: _then_moved(getattr(torch, name)) for name in ("tensor", "as_tensor")}


def _then_moved(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = factory(*args, **kwargs)
        if pin_memory:
            return _copied(made, PINNED)
        return made if device is None else made.to(device)

    return make


@contextmanager
def equal_replicas() -> Iterator[None]:
    """Pretend that digests of replicas add up to 0: where nothing is exchanged, the others' are not there."""
    original = ReplicaCheck.difference

    def difference(check: ReplicaCheck) -> torch.Tensor | None:
        digest = original(check)
        return None if digest is None else digest.zero_()

    with mock.patch.object(ReplicaCheck, "difference", difference):
        yield


# -- autograd and groups ------------------------------------------------------------------------------------


def _backward(original: Callable[..., None]) -> Callable[..., None]:
    """Autograd works off a GPU's nodes in a thread of its own, and the caller waits for it."""

    def backward(*args: Any, **kwargs: Any) -> None:
        caller = here()
        if caller.machine is None or caller.is_in_backward or not caller.machine.runs_hooks_apart:
            original(*args, **kwargs)
            return
        failures: list[BaseException] = []
        mine = replace(caller, streams=dict(caller.streams), is_in_backward=True, device_index=caller.machine.index)

        def work_off() -> None:
            try:
                with as_thread(mine), Mode(mine.machine):
                    original(*args, **kwargs)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work_off, name="autograd's thread of a pretended GPU")
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    return backward


def _backend(original: Callable[..., str]) -> Callable[..., str]:
    def get_backend(*args: Any, **kwargs: Any) -> str:
        backend = original(*args, **kwargs)
        return "nccl" if here().machine is not None and backend == "threaded" else backend

    return get_backend
