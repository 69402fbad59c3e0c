"""Which memory pretends to be a GPU's, and which to be pinned?"""

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from tests.cuda_harness.happens_before import Memory

if TYPE_CHECKING:
    from tests.cuda_harness.machine import Machine

DEVICE, PINNED, HOST_MEMORY = "device", "pinned", "host"
_MARK = "_pretended"
real_device: Any = torch._C.TensorBase.device


class Allocation:
    """What a storage is; an attribute of the storage, so it ends with it."""

    __slots__ = ("kind", "machine", "memory")

    def __init__(self, machine: "Machine", kind: str, memory: Memory) -> None:
        self.machine, self.kind, self.memory = machine, kind, memory

    def __del__(self) -> None:
        if self.kind == DEVICE:  # torch keeps pinned memory by itself until its copies have ended
            self.machine.orders.free(self.memory)


def allocation_of(tensor: torch.Tensor) -> Allocation | None:
    """None for ordinary host memory, and for tensors without any."""
    if isinstance(tensor, DTensor):
        return allocation_of(tensor._local_tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        return allocation_of(tensor.elem)
    if isinstance(tensor, FakeTensor) or real_device.__get__(tensor).type != "cpu" or tensor.layout != torch.strided:
        return None
    return getattr(tensor.untyped_storage(), _MARK, None)


def kind_of(tensor: torch.Tensor) -> str:
    """Where a tensor pretends to be."""
    found = allocation_of(tensor)
    return HOST_MEMORY if found is None else found.kind


def is_host_tensor(tensor: torch.Tensor) -> bool:
    """Whether torch has its values, wherever they pretend to be: not of tensors without any."""
    return not isinstance(tensor, FakeTensor) and real_device.__get__(tensor).type == "cpu"


def allocate(tensor: torch.Tensor, allocation: Allocation) -> None:
    """Say what the storage of a tensor is."""
    setattr(tensor.untyped_storage(), _MARK, allocation)
