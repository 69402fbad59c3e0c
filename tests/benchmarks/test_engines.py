"""Do all engines train alike, and say so when they do not offer something?"""

import dataclasses
import math

import pytest

from benchmarks.engines import RefusedError, build
from benchmarks.entries import OURS, PEERS, Entry, parse_ours, peer
from benchmarks.workload import AWAY, Workload
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.slow

SMALL = Workload(width=32, layers=2, vocabulary=64, sequence=16, micro_batch=1, accumulation=2)
SLEEPING = dataclasses.replace(SMALL, compute=AWAY, forward_s=1e-3, backward_s=2e-3)
IN_BF16 = Workload(width=32, layers=2, vocabulary=64, sequence=16, micro_batch=1, accumulation=2, dtype="bfloat16")


def losses(ctx: RankContext, entry: Entry, workload: Workload) -> list[float]:
    engine = build(entry, workload, world_size=ctx.world_size, ranks_per_node=2)
    return [engine.step(workload.batches(step, ctx.rank)) for step in range(3)]


def refusal(ctx: RankContext, entry: Entry) -> str:
    with pytest.raises(RefusedError) as found:
        build(entry, SMALL, world_size=ctx.world_size, ranks_per_node=2)
    return str(found.value)


def planned(ctx: RankContext, entry: Entry) -> float | None:
    engine = build(entry, SMALL, world_size=ctx.world_size, ranks_per_node=2)
    engine.step(SMALL.batches(0, ctx.rank))
    return engine.facts.get("planned_bytes")


@pytest.mark.parametrize("workload", [SMALL, SLEEPING], ids=["cores", "away"])
def test_all_engines_train_alike(ranks: RankPool, workload: Workload) -> None:
    entries = [*map(peer, PEERS), *parse_ours(",".join(OURS))]
    found = {entry.label: ranks(4, losses, entry, workload, ranks_per_node=2) for entry in entries}
    assert found["ddp"][0] != found["ddp"][1]
    for label, by_rank in found.items():
        for own, expected in zip(by_rank, found["ddp"], strict=True):
            assert own == pytest.approx(expected, rel=1e-2 if label == "zeropp" else 1e-5), label  # it rounds


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("entry", [*map(peer, PEERS), *parse_ours("mics,zero3")], ids=lambda entry: entry.label)
def test_every_engine_trains_in_bf16(ranks: RankPool, entry: Entry) -> None:
    plain = ranks(4, losses, peer("ddp"), SMALL, ranks_per_node=2)
    for own, expected in zip(ranks(4, losses, entry, IN_BF16, ranks_per_node=2), plain, strict=True):
        assert own == pytest.approx(expected, rel=0.02)
        assert own != expected


def test_compute_alone_does_not_average(ranks: RankPool) -> None:
    alone = ranks(2, losses, peer("compute"), SMALL, ranks_per_node=2)
    together = ranks(2, losses, peer("ddp"), SMALL, ranks_per_node=2)
    assert alone[0][0] == together[0][0]
    assert alone[0][2] != together[0][2]


@pytest.mark.parametrize(
    ("label", "expected"),
    [("mics:prefetch=0", "not a positive number"), ("mics:colour=red", "Unknown option"), ("mcs", "not known")],
)
def test_what_is_not_offered_is_refused_on_every_rank(ranks: RankPool, label: str, expected: str) -> None:
    (entry,) = parse_ours(label)
    assert all(expected in message for message in ranks(2, refusal, entry, ranks_per_node=1))


def test_only_what_surely_leaves_the_node_is_called_planned(ranks: RankPool) -> None:
    (mics, zero3) = parse_ours("mics,zero3:hierarchical=False")
    shards = ranks(4, planned, mics, ranks_per_node=2)
    assert all(value is not None and math.isclose(value, 2 * SMALL.numel, rel_tol=0.1) for value in shards)
    assert ranks(4, planned, zero3, ranks_per_node=2) == [None] * 4
