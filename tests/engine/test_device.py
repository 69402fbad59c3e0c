"""Models on a GPU: the device of each rank, and the order of streams on it.

CUDA is simulated: its streams, events and devices record their calls.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import ShardConfig, shard
from mics_strategy.auto_scopes import free_gpu_bytes
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.engine.optimizer.step import total_norm
from mics_strategy.engine.setup.resolve import target_device
from mics_strategy.engine.streams import OpChain, Streams
from mics_strategy.errors import ConfigError
from tests.ranks import RankContext, RankPool

UNQUANTIZED: Any = SimpleNamespace(has_quantized_params=False, is_quantized=lambda *roles: False)
QUANTIZED: Any = SimpleNamespace(has_quantized_params=True, is_quantized=lambda *roles: True)


@dataclass(eq=False)
class Stream:
    """A stream that notes the events it waits for."""

    device: torch.device
    waited: list[object] = field(default_factory=list)

    def wait_stream(self, _: "Stream") -> None:
        """Nothing is to be ordered."""

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class Cuda:
    """The current stream of each of two devices, of which number 0 is current."""

    def __init__(self) -> None:
        self.current = {index: Stream(torch.device("cuda", index)) for index in range(2)}

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.current[0 if device is None or device.index is None else device.index]


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    pretended = Cuda()
    with (
        mock.patch.object(torch.cuda, "current_stream", pretended.current_stream),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "Event", side_effect=lambda: SimpleNamespace(record=lambda _: None)),
    ):
        yield pretended


def chain_on(index: int) -> OpChain:
    side: Any = Stream(torch.device("cuda", index))
    chain = OpChain()
    chain.record(side)
    return chain


def test_the_stream_of_the_models_device_waits_for_an_op_chain(cuda: Cuda) -> None:
    chain_on(1).wait()
    assert [len(stream.waited) for stream in cuda.current.values()] == [0, 1]


def test_every_stream_that_uses_a_result_waits_for_it_once(cuda: Cuda) -> None:
    chain = chain_on(1)
    first, second = cuda.current[1], Stream(torch.device("cuda", 1))
    for stream in (first, first, second, second, first):
        cuda.current[1] = stream
        chain.wait()
    assert (len(first.waited), len(second.waited)) == (1, 1)


def test_all_gathers_and_both_hops_have_their_own_streams() -> None:
    made: list[Stream] = []

    def make(device: torch.device, priority: int = 0) -> Stream:
        made.append(Stream(device))
        return made[-1]

    with mock.patch.object(torch.cuda, "Stream", make):
        streams = Streams(torch.device("cuda", 1), UNQUANTIZED)
    assert [streams.all_gather._stream, streams.reduce_scatter._stream, streams.second_hop._stream] == made
    assert len({id(stream) for stream in made}) == 3


def test_each_encodes_on_a_stream_of_its_own() -> None:
    made: list[Stream] = []

    def make(device: torch.device, priority: int = 0) -> Stream:
        made.append(Stream(device))
        return made[-1]

    with mock.patch.object(torch.cuda, "Stream", make):
        Streams(torch.device("cuda", 1), QUANTIZED)
    assert len({id(stream) for stream in made}) == 6


def use_a_gathered_unit_twice(ctx: RankContext) -> list[int]:
    """Waits for op chains of one unit at each of two uses of its parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = shard(model, "zero3", units=[nn.Linear])
    with torch.no_grad():
        model(torch.ones(1, 4))
        unit = sharded._engine.units[-1]
        counts = []
        for _ in range(2):
            with mock.patch.object(OpChain, "wait", autospec=True) as wait:
                unit.finish_unshard()
            counts.append(wait.call_count)
    return counts


def test_a_unit_checks_its_stream_at_every_use(ranks: RankPool) -> None:
    assert ranks(2, use_a_gathered_unit_twice) == [[1, 1]] * 2


@contextmanager
def devices(count: int, current: int, bound: torch.device | None = None) -> Iterator[mock.Mock]:
    """A process of an NCCL job that sees so many GPUs."""
    group = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound))
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=count),
        mock.patch.object(torch.cuda, "current_device", return_value=current),
        mock.patch.object(torch.cuda, "set_device") as set_device,
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch.object(dist, "group", group),
    ):
        yield set_device


@pytest.mark.parametrize(
    ("count", "current", "local_rank", "bound", "expected"),
    [
        (8, 0, "3", None, 3),
        (1, 0, "3", None, 0),  # each process sees its own GPU only
        (8, 5, "3", None, 5),  # set by the user
        (8, 5, "3", torch.device("cuda", 6), 6),  # `init_process_group(device_id=...)`
        (8, 5, "3", torch.device("cuda", 3), 3),  # by torch 2.15, which does not ask for the current device
        (8, 2, None, None, 2),
        (8, 0, None, None, 0),
    ],
)
@pytest.mark.parametrize("names", [("LOCAL_RANK",), ("SLURM_LOCALID",), ("LOCAL_RANK", "SLURM_LOCALID")], ids="+".join)
def test_a_rank_takes_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    current: int,
    local_rank: str | None,
    bound: torch.device | None,
    expected: int,
    names: tuple[str, ...],
) -> None:
    """With torchrun inside of SLURM's task 0, each rank has a `LOCAL_RANK` of its own."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    if local_rank is not None:
        for name, value in zip(names, (local_rank, "0"), strict=False):
            monkeypatch.setenv(name, value)
    with devices(count, current, bound):
        assert target_device("auto") == torch.device("cuda", expected)
        assert target_device("cuda") == torch.device("cuda", expected)


def test_a_gpu_is_taken_where_asked_for_unless_the_group_is_bound_to_another_one() -> None:
    with devices(8, 5):
        assert target_device("cuda:1") == torch.device("cuda", 1)
    with devices(8, 1, bound=torch.device("cuda", 6)):
        assert target_device("cuda:6") == torch.device("cuda", 6)
        with pytest.raises(ConfigError, match=r"`device=cuda:1`.*bound to cuda:6.*device_id=torch.device\('cuda:1'\)"):
            target_device("cuda:1")


class _Reached(Exception):
    """`shard()` has come to what needs a GPU."""


def shard_on_a_gpu(ctx: RankContext, first: str) -> list[int]:
    os.environ["LOCAL_RANK"] = str(ctx.rank)
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=8),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "set_device") as set_device,
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch(f"mics_strategy.{first}", side_effect=_Reached),
        pytest.raises(_Reached),
    ):
        shard(nn.Linear(2, 2), ShardConfig.preset("mics", partition_size="node"))
    return [call.args[0].index for call in set_device.call_args_list]


@pytest.mark.parametrize("first", ["comm.consensus.gather_objects", "api.CommResources"])
def test_the_gpu_of_a_rank_becomes_current_before_anything_is_sent(ranks: RankPool, first: str) -> None:
    """NCCL gathers objects on the current device: two ranks on one would be refused."""
    assert ranks(2, shard_on_a_gpu, first) == [[0], [1]]


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 70), (0.5, 37)])
def test_memory_for_a_training_is_what_the_process_can_use(fraction: float, expected: int) -> None:
    """Of 80 bytes, others use 7, this process has reserved 13 and allocated 11, of which 8 are the model's."""
    model: Any = SimpleNamespace(parameters=lambda: [torch.empty(2, device="meta")])
    with (
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(60, 80)),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=13),
        mock.patch.object(torch.cuda, "memory_allocated", return_value=11),
        mock.patch.object(torch.cuda, "get_per_process_memory_fraction", return_value=fraction),
    ):
        assert free_gpu_bytes(torch.device("meta"), model) == expected


def test_process_groups_send_tensors_on_the_models_device() -> None:
    groups: Any = SimpleNamespace(device=torch.device("meta"), reduce_over_shards=lambda value, **_: value)
    assert total_norm([], groups, 2.0).is_meta
    assert Streams(torch.device("cpu"), UNQUANTIZED).all_gather._stream is None


def device_of_a_calibration(ctx: RankContext) -> list[torch.device]:
    seen: list[torch.device] = []

    def calibrate(_: object, context: Any) -> list[object]:
        seen.append(context.device)
        return []

    device = torch.device("cpu", 0)
    with mock.patch("mics_strategy.api.autotune", calibrate):
        model = nn.Linear(2, 2)
        sharded = shard(model, "mics", device=device)
    groups: ProcessGroups = sharded._groups
    return [*seen, groups.device]


def test_a_calibration_is_on_the_models_device(ranks: RankPool) -> None:
    assert ranks(2, device_of_a_calibration) == [[torch.device("cpu", 0)] * 2] * 2
