"""Copies of a checkpoint's tensors to the host: how much pinned memory, which values, and who waits for what?"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from mics_strategy.checkpoint.save_planner import HostCopyPool
from tests.cuda_harness.happens_before import HOST
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.pretence import pretended_cuda
from tests.cuda_harness.streams import current_stream

SHARDS = [(500, 96), (512, 300), (300,), (96,), (), (0, 4), (7, 11, 13)]  # of each kind of layer: of 9 layers 3 states


@contextmanager
def pinned_bytes() -> Iterator[list[int]]:
    """Bytes of each pinned allocation, as torch's allocator rounds it: to a power of two."""
    found: list[int] = []
    empty = torch.empty

    def noting(*size: object, pin_memory: bool = False, **options: object) -> Tensor:
        made = empty(*size, pin_memory=pin_memory, **options)
        if pin_memory:
            found.append(1 << (made.nbytes - 1).bit_length())
        return made

    with mock.patch.object(torch, "empty", noting):
        yield found


def tensors_of(num_layers: int, device: torch.device, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    return {
        f"{layer} {state} {index}": torch.randn(shape, generator=generator).to(dtypes[state]).to(device)
        for layer in range(num_layers)
        for state in range(3)
        for index, shape in enumerate(SHARDS)
    }


def copied(pool: HostCopyPool, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    is_pinned = any(tensor.is_cuda for tensor in tensors.values())
    return pool.copy({name: tensor.nbytes for name, tensor in tensors.items()}, tensors.items(), is_pinned=is_pinned)


def test_pinned_memory_is_little_more_than_the_copies_and_is_used_again() -> None:
    pool = HostCopyPool()
    with pretended_cuda(), Machine() as machine, pinned_bytes() as pinned:
        for num_layers, is_new in ((9, True), (9, False), (4, True), (6, True)):
            pinned.clear()
            for seed in range(2):
                tensors = tensors_of(num_layers, machine.device, seed)
                copies = copied(pool, tensors)
                assert copies.keys() == tensors.keys()
                for name, copy in copies.items():
                    assert torch.equal(copy, tensors[name].cpu()), name
                    assert copy.dtype == tensors[name].dtype
                    assert copy.untyped_storage().nbytes() == copy.nbytes, "torch's writer clones it"
                    assert copy.data_ptr() % 64 == 0
            total = sum(tensor.nbytes for tensor in tensors.values())
            assert bool(pinned) == is_new
            assert sum(pinned) <= 1.02 * total
    assert machine.races == []


@pytest.mark.parametrize("numel", [3 * 2**20 + 1, 1, 0])
def test_a_tensor_alone_has_the_next_power_of_two(numel: int) -> None:
    with pretended_cuda(), Machine() as machine, pinned_bytes() as pinned:
        tensors = {"alone": torch.arange(float(numel)).to(machine.device)}
        assert torch.equal(copied(HostCopyPool(), tensors)["alone"], torch.arange(float(numel)))
    assert pinned == [max(64, 1 << max(0, 4 * numel - 1).bit_length())]


def test_the_host_waits_for_the_device_of_the_tensors() -> None:
    with pretended_cuda(), Machine(index=1) as machine:
        tensors = tensors_of(1, machine.device, 0)
        with torch.cuda.device(0):
            copied(HostCopyPool(), tensors)
        stream = current_stream(machine.device).number
        assert machine.orders.record(HOST)[stream] == machine.orders.record(stream)[stream]


def test_nothing_is_pinned_nor_waited_for_on_a_cpu() -> None:
    with pretended_cuda(), Machine() as machine, pinned_bytes() as pinned, machine.step():
        tensors = tensors_of(2, torch.device("cpu"), 0)
        copies = copied(HostCopyPool(), tensors)
        assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())
    assert (pinned, machine.waits) == ([], [])
