"""Is what is pretended what a GPU does?"""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.cuda_harness.machine import Machine
from tests.cuda_harness.operators import ranges_of
from tests.cuda_harness.pretence import pretended_cuda
from tests.cuda_harness.runs import one_of_many


@pytest.fixture
def machine() -> Iterator[Machine]:
    with pretended_cuda(), Machine() as made:
        yield made


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


def test_nothing_is_pretended_outside() -> None:
    before = torch.Tensor.device, torch.Tensor.to, torch.cuda.Stream, torch.autograd.backward
    with pretended_cuda():
        assert torch.ones(1).device.type == "cpu"
        with Machine():
            made = ones(1)
            assert made.is_cuda
        assert not made.is_cuda
    assert before == (torch.Tensor.device, torch.Tensor.to, torch.cuda.Stream, torch.autograd.backward)


def test_tensors_are_where_they_were_made(machine: Machine) -> None:
    on_host, on_device = torch.ones(2), ones(2)
    assert (on_host.device.type, on_device.device) == ("cpu", torch.device("cuda", 0))
    assert (on_device + 1).is_cuda
    assert on_device[:1].is_cuda
    assert torch.nn.Parameter(on_device).is_cuda
    assert not (on_host + 1).is_cuda
    assert on_host.to("cuda").is_cuda
    assert not on_device.cpu().is_cuda
    assert on_device.to(on_device.device) is on_device
    assert torch.empty(1, pin_memory=True).is_pinned()


def test_a_gradient_is_where_its_parameter_is(machine: Machine) -> None:
    weight = torch.nn.Parameter(ones(3, 3))
    torch.tanh(ones(2, 3) @ weight)[:, 1:].square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.is_cuda


def test_tensors_of_two_devices_do_not_mix(machine: Machine) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        ones(2) + torch.ones(2)
    assert (ones(2) * torch.tensor(2.0)).is_cuda


def test_hooks_run_in_another_thread_with_the_streams_of_the_caller(machine: Machine) -> None:
    weight, stream, seen = torch.nn.Parameter(ones(2)), torch.cuda.Stream(), []
    weight.register_hook(lambda _: seen.append((threading.current_thread(), torch.cuda.current_stream())))
    with torch.cuda.stream(stream):
        weight.sum().backward()
    assert seen[0][0] is not threading.current_thread()
    assert seen[0][1] is stream


def test_an_exception_in_a_hook_reaches_the_caller(machine: Machine) -> None:
    weight = torch.nn.Parameter(ones(2))

    def fail(_: torch.Tensor) -> None:
        raise InterruptedError("in a hook")

    weight.register_hook(fail)
    with pytest.raises(InterruptedError, match="in a hook"):
        weight.sum().backward()


def test_each_device_has_a_current_stream(machine: Machine) -> None:
    first, second = torch.cuda.current_stream(0), torch.cuda.current_stream(1)
    assert first is not second
    assert torch.cuda.current_stream() is first
    torch.cuda.set_device(1)
    assert torch.cuda.current_stream() is second
    other = torch.cuda.Stream(0)
    with torch.cuda.stream(other):
        assert torch.cuda.current_stream() is other
        assert torch.cuda.current_stream(1) is second
    assert torch.cuda.current_stream() is second


@pytest.mark.parametrize("waits", [False, True])
def test_work_on_two_streams_is_ordered_by_waiting(machine: Machine, waits: bool) -> None:
    tensor, stream = ones(4), torch.cuda.Stream()
    if waits:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tensor.add_(1)
    assert bool(machine.races) is not waits


@pytest.mark.parametrize("waits", [False, True])
def test_memory_goes_back_to_the_stream_on_which_it_was_made(machine: Machine, waits: bool) -> None:
    tensor, stream = ones(4), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copied = tensor + 1
    del tensor
    if waits:
        torch.cuda.current_stream().wait_stream(stream)
    assert machine.races == []
    ones(1)
    assert [race.partition(":")[0] for race in machine.races] == ([] if waits else ["freed while in use"])
    assert copied.is_cuda


@pytest.mark.parametrize("waits", [False, True])
def test_a_collective_runs_on_a_stream_of_its_own(waits: bool) -> None:
    with one_of_many() as machine:
        shard, whole = ones(2), torch.empty(16, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            work = dist.group.WORLD._allgather_base(whole, shard)
            if waits:
                work.wait()
            whole.add_(1)
            work.wait()
        torch.cuda.synchronize()
    assert bool(machine.races) is not waits


def test_nccls_stash_keeps_tensors_until_somebody_waits() -> None:
    with one_of_many() as machine:
        work = dist.all_reduce(ones(2), async_op=True)
        assert machine.races == []
        work.wait()
        assert machine.races == []


def test_a_gather_in_place_leaves_its_own_part_alone() -> None:
    with one_of_many() as machine:
        whole, stream = ones(16), torch.cuda.Stream()
        work = dist.group.WORLD._allgather_base(whole, whole[:2])
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            whole[:2].sum()
            assert machine.races == []
            whole[1:3].sum()
            assert machine.races != []
            work.wait()
        torch.cuda.synchronize()


def test_a_pinned_copy_is_there_when_the_host_has_waited(machine: Machine) -> None:
    pinned, event = torch.zeros(2, pin_memory=True), torch.cuda.Event()
    pinned.copy_(ones(2), non_blocking=True)
    event.record()
    event.synchronize()
    pinned.tolist()
    assert machine.races == []
    pinned.copy_(ones(2), non_blocking=True)
    pinned.add_(1)
    assert machine.races != []


WAITS = {
    "item": lambda tensor: tensor[0].item(),
    "bool": lambda tensor: bool(tensor[0] > 0),
    "tolist": lambda tensor: tensor.tolist(),
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: tensor.to("cpu", non_blocking=True),
    "equal": lambda tensor: torch.equal(tensor, tensor),
    "mask": lambda tensor: tensor[tensor > 0],
    "nonzero": lambda tensor: tensor.nonzero(),
    "copy from the host": lambda tensor: tensor.copy_(torch.ones(3)),
    "pageable": lambda tensor: tensor.copy_(torch.ones(3), non_blocking=True),
    "move from the host": lambda tensor: torch.ones(3).to("cuda"),
    "tensor": lambda tensor: torch.tensor([1.0], device="cuda"),
    "stream": lambda tensor: torch.cuda.current_stream().synchronize(),
    "device": lambda tensor: torch.cuda.synchronize(),
    "event": lambda tensor: torch.cuda.current_stream().record_event().synchronize(),
}
GOES_ON = {
    "kernel": lambda tensor: tensor.add_(1).clamp_(max=2),
    "item of the host": lambda tensor: torch.ones(1).item(),
    "copy from pinned": lambda tensor: tensor.copy_(torch.ones(3, pin_memory=True), non_blocking=True),
    "copy to pinned": lambda tensor: torch.ones(3, pin_memory=True).copy_(tensor, non_blocking=True),
    "norm": lambda tensor: torch._foreach_norm([tensor, tensor], 2.0),
    "clone": lambda tensor: tensor.clone().to(torch.float64),
}


@pytest.mark.parametrize("what", WAITS)
def test_the_host_waits(machine: Machine, what: str) -> None:
    tensor = ones(3)
    with machine.step():
        WAITS[what](tensor)
    assert len(machine.waits) == 1


@pytest.mark.parametrize("what", GOES_ON)
def test_the_host_goes_on(machine: Machine, what: str) -> None:
    tensor = ones(3)
    with machine.step():
        GOES_ON[what](tensor)
    assert machine.waits == []


@pytest.mark.parametrize("operator", [torch._foreach_copy_, torch._foreach_add_])
@pytest.mark.parametrize(("shape", "kernels"), [((1, 4), 1), ((2, 2), 3)], ids=["one row", "rows with gaps"])
def test_lists_are_taken_one_by_one_where_strides_differ(
    machine: Machine, operator: Callable[..., None], shape: tuple[int, int], kernels: int
) -> None:
    table = ones(2, 12)
    parts = [torch.as_strided(table, shape, (12, 1), 4 * index) for index in range(3)]
    others = [ones(*shape) for _ in parts]
    machine.log.clear()
    operator(parts, others)
    assert len(machine.log) == kernels


def test_ranges_are_those_of_rows() -> None:
    table = torch.zeros(4, 6)
    assert ranges_of(table) == [(0, 96)]
    assert ranges_of(table[:, 1:3]) == [(4, 12), (28, 36), (52, 60), (76, 84)]
    assert ranges_of(table[1:3]) == [(24, 72)]
    assert ranges_of(table.t()) == [(0, 96)]
    assert ranges_of(table[:, :0]) == []
    assert ranges_of(torch.zeros(3, 1).expand(3, 5)) == [(0, 12)]
    assert ranges_of(torch.zeros(100, 4)[:, :2]) == [(0, 4 * 398)]
