"""Is a tensor encoded while the one before it is on the wire? By the order of events, not by time."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.communicator import Communicator
from mics_strategy.comm.work import Work
from mics_strategy.comm.workspace import Workspace
from tests.comm.networks import Network
from tests.ranks import RankContext, RankError, RankPool

NUMEL = 512
KINDS = ("gather", "reduce", "all_reduce")
CODECS = {"int8": Codec.of("int8"), "int4": Codec.of("int4"), "random": Codec(bits=8, rounding="stochastic")}
STUCK_S = 20.0  # after which a rank no longer waits for the other


def start(kind: str, comm: Communicator, values: torch.Tensor, label: str) -> tuple[Work, torch.Tensor]:
    """Start a collective of 512 numbers for each rank; its work and its result."""
    if kind == "gather":
        out = torch.empty(comm.size * NUMEL)
        return comm.all_gather(out, values[:NUMEL], label), out
    if kind == "reduce":
        out = torch.zeros(NUMEL)
        return comm.reduce_scatter(out, values, False, label), out
    return comm.all_reduce(values, torch.float32, label), values


def reserve(kind: str, comm: Communicator) -> None:
    if kind == "gather":
        comm.reserve("all_gather", comm.size * NUMEL, torch.float32, torch.float32)
    elif kind == "reduce":
        comm.reserve("reduce_scatter", comm.size * NUMEL, torch.float32, torch.float32)
    else:
        comm.reserve("all_reduce", comm.size * NUMEL, torch.float32, torch.float32)


@contextmanager
def counted(done: Callable[[int], None]) -> Iterator[None]:
    """Call `done` with the number of encodings so far, after each."""
    encode, count = Quantizer.encode, 0

    def encode_and_count(
        quantizer: Quantizer, values: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        nonlocal count
        encode(quantizer, values, out, residual)
        count += 1
        done(count)

    with mock.patch.object(Quantizer, "encode", encode_and_count):
        yield


def wait_for(file: Path) -> bool:
    deadline_s = time.monotonic() + STUCK_S
    while not file.exists() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return file.exists()


def withhold(ctx: RankContext, kind: str, codec: str, stages: int) -> None:
    """The last rank takes part in nothing before rank 0 has encoded the second of two tensors."""
    network = Network(ctx, CODECS[codec], "all", stages)
    comm, encoded = network.one, ctx.tmp_path / f"{kind} {codec}"
    reserve(kind, comm)
    network.lend()
    tensors = [network.values(comm.index, comm.size * NUMEL, salt=salt) for salt in (1, 2)]

    both_submitted = threading.Event()

    def done(count: int) -> None:
        both_submitted.wait(STUCK_S)  # a tensor that is submitted later is encoded when the thread is free again
        if ctx.rank == 0 and count == 2:
            encoded.touch()

    with counted(done):
        if ctx.rank == ctx.world_size - 1:
            assert wait_for(encoded), "the second tensor is not encoded before the first has arrived"
        works = [start(kind, comm, tensor, f"block {number}") for number, tensor in enumerate(tensors)]
        both_submitted.set()
        for work, _ in works:
            work.wait()


def withhold_all(ctx: RankContext, stages: int) -> bool:
    for kind, codec in itertools.product(KINDS, ("int8", "int4")):
        withhold(ctx, kind, codec, stages)
    return True


@pytest.mark.parametrize("stages", [1, 2])
def test_the_second_tensor_is_encoded_before_the_first_has_arrived(ranks: RankPool, stages: int) -> None:
    assert ranks(4, withhold_all, stages, ranks_per_node=2) == [True] * 4


def withhold_without_parts(ctx: RankContext) -> None:
    with mock.patch.object(Workspace, "encode_ahead"), mock.patch(f"{__name__}.STUCK_S", 0.5):
        withhold(ctx, "gather", "int8", 1)


def test_with_one_part_it_is_not(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="is not encoded before the first has arrived"):
        ranks(4, withhold_without_parts, ranks_per_node=2)


def results(network: Network, kind: str, *, waits: bool) -> list[torch.Tensor]:
    """Those of six tensors, each after the one before has ended, or all at once."""
    comm, started = network.one, []
    for salt in range(6):
        tensor = network.values(comm.index, comm.size * NUMEL, salt=salt)
        started.append(start(kind, comm, tensor, f"block {salt}"))
        if waits:
            started[-1][0].wait()
    for work, _ in started:
        work.wait()
    return [result for _, result in started]


def compare(ctx: RankContext, codec: str) -> list[str]:
    """The collectives whose results depend on what is in flight."""
    wrong = []
    for kind, stages in itertools.product(KINDS, (1, 2)):
        found = []
        for waits in (False, True):
            network = Network(ctx, CODECS[codec], "all", stages)
            reserve(kind, network.one)
            network.lend()
            found.append(results(network, kind, waits=waits))
        if not all(map(torch.equal, *found)):
            wrong.append(f"{kind} in {stages}")
    return wrong


@pytest.mark.parametrize("codec", CODECS)
def test_results_are_those_of_one_tensor_after_the_other(ranks: RankPool, codec: str) -> None:
    """To the bit, random rounding as well: the random numbers follow the order of the tensors, whatever the timing."""
    assert ranks(4, compare, codec, ranks_per_node=2) == [[]] * 4


def depend(ctx: RankContext) -> bool:
    """The second collective reads what the first one writes."""
    network = Network(ctx, CODECS["int8"], "all", 1)
    comm = network.one
    reserve("all_reduce", comm)
    reserve("gather", comm)
    network.lend()
    tensor = network.values(comm.index, comm.size * NUMEL)
    out = torch.empty(comm.size * NUMEL)
    works = [comm.all_reduce(tensor, torch.float32, "sum"), comm.all_gather(out, tensor[:NUMEL], "gather")]
    for work in works:
        work.wait()
    rows = out.view(comm.size, -1)
    return bool((rows == rows[0]).all()) and torch.allclose(rows[0], tensor[:NUMEL], atol=0.1)


def test_what_one_collective_writes_the_next_one_reads(ranks: RankPool) -> None:
    assert ranks(4, depend, ranks_per_node=2) == [True] * 4
