"""Do ranks that wait in vain, and ranks whose peer has died, say so soon, and does nobody else?"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mics_strategy.comm import watched_work
from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.resources import CommResources
from mics_strategy.comm.transport import GlooTransport
from mics_strategy.comm.work import Work
from mics_strategy.errors import CommunicationError, LifecycleError
from mics_strategy.scopes import Scopes
from mics_strategy.topology import Axis
from tests.comm.networks import Network
from tests.ranks import RankContext, RankError, RankPool, raises_on_every_rank

FP32 = torch.float32
TIMEOUT_S = 20.0
EIGHT_PIECES = 150_000
INT8 = Codec(bits=8, block_size=64)

worlds = pytest.mark.parametrize(("world", "per_node"), [(2, 2), (2, 1), (4, 2)])


@contextmanager
def impatient(patience_s: float = 0.2) -> Iterator[None]:
    with (
        mock.patch.object(watched_work, "STALL_CHECK_S", patience_s),
        mock.patch.object(watched_work, "MAX_STALL_CHECK_S", patience_s),
    ):
        yield


def names_both(failure: RankError, first: str, second: str) -> bool:
    """Whether all say that rank 1 waits for the second and some other rank for the first."""
    return all(
        f"rank 1 for the {second} (" in str(error) and re.search(rf"rank [023] for the {first} \(", str(error))
        for error in failure.by_rank.values()
    )


def ready(ctx: RankContext, numel: int = 100) -> Network:
    """A network with memory for anything of that size, through which something has gone."""
    network = Network(ctx)
    assert network.gather(8)
    for collective in (network.one, network.other):
        collective.reserve("reduce_scatter", numel * ctx.world_size, FP32, FP32)
        collective.reserve("all_reduce", numel, torch.bfloat16, FP32)
        collective.reserve("all_reduce", numel, FP32, FP32)
    network.lend()
    return network


def gathered(network: Network, what: str, numel: int = 8) -> Work:
    return network.one.all_gather(torch.zeros(network.one.size * numel), torch.ones(numel), what)


def reduced(network: Network, what: str, numel: int = 8) -> Work:
    return network.other.reduce_scatter(torch.zeros(numel), torch.ones(network.one.size * numel), False, what)


def ask_for_different_things(ctx: RankContext) -> None:
    network = ready(ctx)
    with impatient():
        gathered(network, "layers.7" if ctx.rank == 1 else "layers.3").wait()


@worlds
def test_ranks_that_are_asked_for_different_things_say_so(ranks: RankPool, world: int, per_node: int) -> None:
    failure = raises_on_every_rank(
        lambda: ranks(world, ask_for_different_things, ranks_per_node=per_node, timeout_s=TIMEOUT_S),
        LifecycleError,
        r"rank \d for the all-gather of layers.\d \(collective 1 of its queue\), rank \d for the all-gather of layers",
    )
    assert names_both(failure, "all-gather of layers.3", "all-gather of layers.7")


def wait_for_one_another(ctx: RankContext) -> None:
    network = ready(ctx)
    with impatient():
        if ctx.rank == 1:
            reduced(network, "layers.7").wait()
        else:
            gathered(network, "layers.3").wait()


@worlds
def test_ranks_that_wait_for_one_another_in_two_lanes_say_so(ranks: RankPool, world: int, per_node: int) -> None:
    failure = raises_on_every_rank(
        lambda: ranks(world, wait_for_one_another, ranks_per_node=per_node, timeout_s=TIMEOUT_S),
        LifecycleError,
        "Ranks diverged",
    )
    assert names_both(failure, "all-gather of layers.3", "reduce-scatter of layers.7")


def wait_for_what_is_behind(ctx: RankContext) -> None:
    """Rank 0 waits for its second transfer, rank 1 for its first; it is the first ones that differ."""
    network = ready(ctx)
    with impatient():
        handles = [gathered(network, "layers.7" if ctx.rank else "layers.3")]
        handles.append(gathered(network, "layers.5"))
        handles[1 - ctx.rank].wait()


def test_what_is_behind_a_transfer_that_differs_waits_in_vain_too(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(2, wait_for_what_is_behind, timeout_s=TIMEOUT_S), LifecycleError, r"layers.3.*layers.7"
    )


def ask_for_different_sizes(ctx: RankContext, kind: str) -> None:
    network = ready(ctx, 2000)
    numel, size = 8 * (1 + (ctx.rank == 1)), ctx.world_size
    with impatient():
        if kind == "gather":
            gathered(network, "layers.3", numel).wait()
        elif kind == "reduce":
            reduced(network, "layers.3", numel).wait()
        else:
            network.one.all_reduce(torch.zeros(size * numel), getattr(torch, kind), "layers.3").wait()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("gather", "all-gather"), ("reduce", "reduce-scatter"), ("bfloat16", "all-reduce"), ("float32", "all-reduce")],
)
@pytest.mark.parametrize(("world", "per_node"), [(2, 2), (4, 2)])
def test_ranks_that_are_asked_for_different_sizes_say_so(
    ranks: RankPool, world: int, per_node: int, kind: str, name: str
) -> None:
    raises_on_every_rank(
        lambda: ranks(world, ask_for_different_sizes, kind, ranks_per_node=per_node, timeout_s=TIMEOUT_S),
        LifecycleError,
        rf"rank \d for the {name} of layers.3 of \d+ torch.\w+ \(.*, rank \d for the {name} of layers.3 of \d+",
    )


def be_slow(ctx: RankContext) -> bool:
    """Each rank in turn lets the others wait, in both queues, once before it asks and once between two transfers."""
    network = ready(ctx)
    with impatient(0.05):
        for slow in range(ctx.world_size):
            handles = [gathered(network, f"layers.{slow}")]
            time.sleep(0.6 if ctx.rank == slow else 0.0)
            handles += [reduced(network, f"layers.{slow}"), gathered(network, f"more.{slow}")]
            for handle in handles if slow % 2 else handles[::-1]:
                handle.wait()
            time.sleep(0.3 if ctx.rank == slow else 0.0)
    return network.gather(8)


def test_ranks_that_are_merely_slow_are_waited_for(ranks: RankPool) -> None:
    assert ranks(4, be_slow, ranks_per_node=2) == [True] * 4


def let_nodes_differ(ctx: RankContext) -> bool:
    """Parameters live in a node, so node 0 may gather once more; what all nodes share they share."""
    axes = (Axis(name="intra_node", size=2, stride=1), Axis(name="inter_node", size=2, stride=2))
    scopes = Scopes(
        world_size=4, ranks_per_node=2, params=2, grads=2, optimizer=4, secondary=2, axes=axes, is_hierarchical=True
    )
    groups = ProcessGroups(scopes, CommResources(4, "cpu"), seed=0)
    assert groups.param_comm is not None
    assert groups.trainable_placement.sync_comm is not None
    with impatient(0.05):
        for _ in range(1 - ctx.node):
            groups.param_comm.all_gather(torch.empty(8), torch.ones(4), "more").wait()
        time.sleep(0.6 * ctx.node)
        for step in range(2):
            out = torch.empty(8)
            groups.trainable_placement.sync_comm.all_gather(out, torch.full((4,), float(step)), f"update {step}").wait()
            assert torch.equal(out, torch.full((8,), float(step)))
            time.sleep(0.6 * (1 - ctx.node))
    return True


def test_ranks_of_different_groups_may_have_been_asked_for_different_things(ranks: RankPool) -> None:
    assert ranks(4, let_nodes_differ, ranks_per_node=2, timeout_s=TIMEOUT_S) == [True] * 4


DYING = 2


def lose_a_rank(ctx: RankContext, kind: str, codec: Codec | None, num_stages: int) -> None:
    """Rank 2 dies when it hands its first message to the transport."""
    network = Network(ctx, codec, "slow", num_stages)
    assert codec is not None or network.gather(8)
    one, numel = network.one, 1000
    one.reserve("all_gather", one.size * numel, FP32, FP32)
    one.reserve("reduce_scatter", 4 * numel, FP32, FP32)
    one.reserve("all_reduce", numel, FP32, FP32)
    network.lend()
    dist.barrier()
    with dying() if ctx.rank == DYING else impatient():
        if kind == "gather":
            one.all_gather(torch.empty(4 * numel), torch.ones(numel), "layers.3").wait()
        elif kind == "reduce":
            one.reduce_scatter(torch.empty(numel), torch.ones(4 * numel), False, "layers.3").wait()
        else:
            one.all_reduce(torch.ones(numel), FP32, "layers.3").wait()


@contextmanager
def dying() -> Iterator[None]:
    """Kill this process at the first message, or all-reduce, that is handed to the transport."""

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(GlooTransport, "send", die), mock.patch.object(GlooTransport, "all_reduce", die):
        yield


@pytest.mark.parametrize("codec", [None, INT8], ids=["plain", "int8"])
@pytest.mark.parametrize("stages", [1, 2], ids=["one-stage", "two-stages"])
@pytest.mark.parametrize(
    ("kind", "name"), [("gather", "All-gather"), ("reduce", "Reduce-scatter"), ("all_reduce", "All-reduce")]
)
def test_when_a_rank_dies_the_others_say_what_failed_and_among_whom(
    ranks: RankPool, kind: str, name: str, stages: int, codec: Codec | None
) -> None:
    with pytest.raises(RankError) as failure:
        ranks(4, lose_a_rank, kind, codec, stages, ranks_per_node=2, timeout_s=TIMEOUT_S)
    errors = failure.value.by_rank
    assert sorted(errors) == [0, 1, 2, 3]
    assert isinstance(errors.pop(DYING), ChildProcessError)
    for rank, error in errors.items():
        assert isinstance(error, CommunicationError), (rank, error)
        assert f"{name} of layers.3 over" in str(error)
        assert "A rank died" in str(error)
        named = str(error).split("(ranks ")[1].split(")")[0].split(", ")
        assert str(rank) in named


def lose_a_peer(ctx: RankContext, kind: str) -> None:
    """Rank 2 dies when the others begin; it is the source of what is broadcast."""
    peers = Network(ctx).groups.world_group
    assert peers is not None
    dist.barrier()
    if ctx.rank == DYING:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor, source = torch.ones(4), [0, 2, 1, 3].index(DYING)  # nodes are the slower axis
    if kind == "Exchange":
        peers.all_to_all(torch.empty(4), [1] * 4, tensor, [1] * 4, "layers.3").wait()
    elif kind == "All-reduce":
        peers.all_reduce(tensor, "layers.3").wait()
    elif kind == "Broadcast":
        peers.broadcast(tensor, "layers.3", source)
    elif kind == "share":
        peers.broadcast_object(None, source)
    else:
        gather_objects(ctx.rank)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        *((kind, f"{kind} of layers.3 over .*ranks 0, 2, 1, 3") for kind in ("Exchange", "All-reduce", "Broadcast")),
        ("share", "Broadcast of an object over .*ranks 0, 2, 1, 3"),
        ("gather_objects", "gathered from all 4 ranks"),
    ],
)
def test_when_a_peer_dies_all_who_need_it_say_so(ranks: RankPool, kind: str, said: str) -> None:
    with pytest.raises(RankError) as failure:
        ranks(4, lose_a_peer, kind, ranks_per_node=2, timeout_s=TIMEOUT_S)
    errors = failure.value.by_rank
    assert isinstance(errors.pop(DYING), ChildProcessError)
    assert sorted(errors) == [0, 1, 3]
    for error in errors.values():
        assert isinstance(error, CommunicationError), repr(error)
        assert re.search(said, str(error))
        assert "A rank died" in str(error)


class Refused:
    """Cannot be pickled, like a sharded model."""

    def __reduce__(self) -> str:
        """Says so."""
        raise LifecycleError("this cannot be pickled")


def send_what_is_refused(ctx: RankContext) -> bool:
    peers = Network(ctx).groups.world_group
    assert peers is not None
    for send in (lambda: gather_objects(Refused()), lambda: peers.broadcast_object(Refused(), peers.index)):
        with pytest.raises(LifecycleError, match=r"^this cannot be pickled$"):
            send()
    return True


def test_what_refuses_to_be_pickled_is_not_taken_for_a_dead_rank(ranks: RankPool) -> None:
    assert ranks(2, send_what_is_refused) == [True] * 2
