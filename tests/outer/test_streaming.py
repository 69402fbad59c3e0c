"""Outer steps in fragments and with a delay: do islands compute what plain torch computes in one process?"""

import itertools
import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from mics_strategy import Codec, CommunicationError, ShardConfig, finish_delayed
from mics_strategy.outer.target import outer_of
from mics_strategy.timeline import COMPUTE_ROW, Row
from tests.engine.training import distance, wholes
from tests.outer.plain import UNITS, Rounds, batch, train_islands
from tests.outer.test_outer_codec import train_in_fp32
from tests.outer.test_outer_steps import (
    FIELDS,
    LAYOUTS,
    check,
    config_of,
    report_of,
    run_step,
    start,
    train,
    train_scaled,
)
from tests.ranks import RankContext, RankError, RankPool, simulate

STREAMING = {
    "delay": Rounds(every=4, steps=11, delay=2, clip=0.5, accumulation=2),
    "delay of a round": Rounds(every=3, steps=8, delay=2, alpha=0.25),
    "dropped": Rounds(every=4, steps=9, delay=1, alpha=0.0, optimizer="sgd", clip=0.5),
    "fragments": Rounds(every=5, steps=12, fragments=3),
    "both": Rounds(every=4, steps=11, fragments=3, delay=3, optimizer="sgd", clip=0.5),
    "each step": Rounds(every=6, steps=14, fragments=6, delay=4, alpha=0.75, accumulation=2, clip=0.5),
}
BOTH = Rounds(every=4, steps=10, fragments=3, delay=2)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("name", FIELDS)
def test_islands_stream_as_plain_torch_in_one_process(ranks: RankPool, name: str, streaming: str) -> None:
    islands, rounds = LAYOUTS["2x2"], STREAMING[streaming]
    check(ranks(4, train, config_of(name, rounds, 2), rounds), train_islands(rounds, islands), islands)


@pytest.mark.parametrize("name", ["mics", "ddp"])
def test_four_islands_stream_as_plain_torch(ranks: RankPool, name: str) -> None:
    islands = LAYOUTS["4x1"]
    check(ranks(4, train, config_of(name, BOTH, 1), BOTH), train_islands(BOTH, islands), islands)


def test_a_stream_of_a_device_computes_the_same() -> None:
    islands = LAYOUTS["2x2"]
    found = simulate(4, train, config_of("mics", BOTH, 2), BOTH, ranks_per_node=2)
    check(found, train_islands(BOTH, islands), islands)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("steps", [1, 4, 5, 7, 8])
@pytest.mark.parametrize("fields", [{"delay": 2}, {"fragments": 3}, {"fragments": 3, "delay": 2}], ids=str)
def test_the_end_of_a_training_leaves_one_model(ranks: RankPool, fields: dict[str, int], steps: int) -> None:
    """Behind the first step, in a round, at its end, and with what is in flight."""
    islands, rounds = LAYOUTS["2x2"], Rounds(every=4, steps=steps, finishes=True, **fields)
    found = ranks(4, train, config_of("mics", rounds, 2), rounds)
    check(found, train_islands(rounds, islands), islands)
    assert any(not torch.equal(found[0][-2][0][name], value) for name, value in found[2][-2][0].items())
    assert all(torch.equal(found[0][-1][0][name], value) for of_rank in found for name, value in of_rank[-1][0].items())


def test_a_delayed_outer_step_that_ends_at_once_is_one_without_a_delay(ranks: RankPool) -> None:
    """The end of a training that ends with a round."""
    plain, delayed = (Rounds(every=4, steps=4, finishes=bool(delay), delay=delay) for delay in (0, 3))
    found = ranks(4, train, config_of("mics", delayed, 2), delayed)
    expected = ranks(4, train, config_of("mics", plain, 2), plain)
    assert all(torch.equal(found[0][-1][0][name], value) for name, value in expected[0][-1][0].items())


def train_on(ctx: RankContext, config: ShardConfig, rounds: Rounds) -> list[Any]:
    """Two trainings behind one another: the first is finished, and the second begins with its end."""
    trained, found = start(config, rounds), []
    for step in range(2 * rounds.steps):
        run_step(ctx, rounds, trained, step)
        if step + 1 == rounds.steps:
            finish_delayed(trained[1])
            outer = outer_of(trained[1])
            assert outer is not None
            assert outer.num_in_round == 0
            found.append([wholes(dict(trained[0].named_parameters())), outer.buckets[0].momentum.abs().sum().item()])
    assert not finish_delayed(trained[1])
    return [*found, wholes(dict(trained[0].named_parameters()))]


@pytest.mark.parametrize("name", ["mics", "ddp"])
def test_a_training_goes_on_behind_its_end(ranks: RankPool, name: str) -> None:
    found = ranks(4, train_on, config_of(name, BOTH, 2), BOTH)
    for (values, momentum), last in found:
        assert momentum > 0
        assert all(torch.equal(value, found[0][1][key]) for key, value in last.items())
        assert all(torch.equal(value, found[0][0][0][key]) for key, value in values.items())


@pytest.mark.parametrize(("name", "optimizer"), [("mics", "two"), ("zero1", "muon")])
def test_fragments_come_behind_the_last_optimizer(ranks: RankPool, name: str, optimizer: str) -> None:
    """Muon's own arithmetic is in bfloat16, where equal gradients but for rounding may differ by a digit."""
    islands, rounds = LAYOUTS["2x2"], Rounds(every=3, steps=7, fragments=2, delay=2, optimizer=optimizer, clip=0.5)
    config = config_of(name, rounds, 2, optimizer_layout="tensors" if optimizer == "muon" else "rows")
    found = ranks(4, train, config, rounds)
    check(found, train_islands(rounds, islands), islands, atol=1e-3 if optimizer == "muon" else 1e-12)


@pytest.mark.parametrize("name", ["mics", "zero1", "ddp"])
def test_a_layer_without_gradients_takes_its_outer_steps(ranks: RankPool, name: str) -> None:
    islands, rounds = LAYOUTS["2x2"], Rounds(every=2, steps=6, leaves_out=True, fragments=2, delay=1)
    check(ranks(4, train, config_of(name, rounds, 2), rounds), train_islands(rounds, islands), islands)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_that_a_scaler_skips_is_none_of_the_round(ranks: RankPool, clip: float | None) -> None:
    islands, rounds = LAYOUTS["2x2"], Rounds(every=3, steps=8, skipped=(1, 4), clip=clip, fragments=2, delay=2)
    check(ranks(4, train_scaled, config_of("mics", rounds, 2), rounds), train_islands(rounds, islands), islands)


def train_and_evaluate(ctx: RankContext, config: ShardConfig, rounds: Rounds) -> list[tuple[dict[str, Tensor], Tensor]]:
    """As `train`; also the outputs of an evaluation behind each step."""
    trained, found = start(config, rounds), []
    for step in range(rounds.steps):
        run_step(ctx, rounds, trained, step)
        trained[0].eval()
        with torch.no_grad():
            output = trained[0](batch(99, 0, 0))
        found.append((wholes(dict(trained[0].train().named_parameters())), output))
    return found


@pytest.mark.parametrize("name", ["mics", "zero1", "ddp"])
def test_an_evaluation_is_of_each_islands_own_model(ranks: RankPool, name: str) -> None:
    islands = LAYOUTS["2x2"]
    found = ranks(4, train_and_evaluate, config_of(name, BOTH, 2), BOTH)
    check(found, train_islands(BOTH, islands), islands)
    for first, second, third, fourth in zip(*found, strict=True):
        assert torch.equal(first[1], second[1])
        assert torch.equal(third[1], fourth[1])
        assert not torch.equal(first[1], third[1])


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("name", FIELDS)
def test_each_fragment_sends_its_part_as_planned(ranks: RankPool, name: str, codec: str) -> None:
    rounds = Rounds(every=4, steps=9, fragments=3, delay=2)
    whole, config = Rounds(every=4, steps=4), config_of(name, rounds, 2, outer_codec=codec)
    in_one = sent_between(ranks(4, train, config_of(name, whole, 2, outer_codec=codec), whole)[0])
    for of_rank in ranks(4, train, config, rounds):
        for _, rows in of_rank[1:]:
            assert all((row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes) for row in rows)
        sent = sent_between(of_rank)
        assert [bool(count) for count in sent] == [True, True, False, True, True, True, False, True, True]
        assert sum(sent[:4]) == sum(sent[4:8]) == sum(in_one)


def sent_between(found: list[Any]) -> list[int]:
    """Bytes that leave an island, by step."""
    return [sum(row.sent_bytes for row in rows if row.axis == "inter_node") for _, rows in found]


def train_coded(ctx: RankContext, config: ShardConfig) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Anchors and parameters of this rank behind four steps in fp32."""
    handles: list[Any] = []
    values = train_in_fp32(ctx, config, handles)[-1][0]
    outer = outer_of(handles[0])
    assert outer is not None
    return [each.anchor.clone() for each in outer.buckets], values


@pytest.mark.parametrize("name", ["mics", "ddp"])
def test_islands_decode_the_same_sums(ranks: RankPool, name: str) -> None:
    rounds = Rounds(every=2, steps=4, fragments=2, delay=1)
    exact, coded = (
        ranks(4, train_coded, config_of(name, rounds, 2, outer_codec=codec))
        for codec in ("none", Codec(bits=8, block_size=32))
    )
    assert all(torch.equal(one, other) for one, other in zip(coded[0][0], coded[2][0], strict=True))
    assert 1e-6 < distance(coded[0][1], exact[0][1]) < 0.02


class Link:
    """The links between islands, which are shut until `open` lets the all-reduces of a fragment or round pass."""

    def __init__(self, trained: Any, num_buckets: int) -> None:
        self.events: list[str] = []
        self._gates = [threading.Event() for _ in range(8)]
        (transport,) = {*trained[1].internals.groups.island.outer_comm.transports}
        barrier, count = transport.barrier, itertools.count()  # with which each all-reduce begins

        def gated(tag: int) -> None:
            number = next(count) // num_buckets
            self._gates[number].wait(30.0)
            self.events.append(f"sends {number}")
            barrier(tag)

        transport.barrier = gated

    def open(self, number: int) -> None:
        self._gates[number].set()


LATE = Rounds(every=4, steps=9, delay=3, optimizer="sgd", clip=0.5)


def step_while_shut(ctx: RankContext, config: ShardConfig) -> tuple[list[str], tuple[Row, ...]]:
    """Steps, and what the links between islands do, in their order; and the rows of a profile.

    The outer step of step 4 leaves no rank before it has taken step 6; it is due behind step 7.
    """
    trained = start(config, LATE)
    link = Link(trained, len(UNITS))
    for step in range(1, LATE.steps + 1):
        if step == 2:
            profile = trained[1].profile(steps=7)
        if step == LATE.every + LATE.delay:
            link.open(0)
        run_step(ctx, LATE, trained, step)
        link.events.append(f"step {step}")
    link.open(1)
    return link.events, profile.result.own_rows


def test_steps_run_while_an_outer_step_is_in_flight(ranks: RankPool) -> None:
    """A rank that waited for the link in between would wait until a time-out."""
    for events, rows in ranks(4, step_while_shut, config_of("mics", LATE, 2)):
        order = [event for event in events if event != "sends 1"]
        assert order[:6] == [f"step {n}" for n in range(1, 7)]
        assert order[6:] == ["sends 0"] * len(UNITS) + ["step 7", "step 8", "step 9"]
        (outer,) = [row for row in rows if row.resource.startswith("outer")]
        compute = next(row for row in rows if row.resource == COMPUTE_ROW)
        first = outer.intervals[0]
        during = [each for each in compute.intervals if first.submitted_s < each.start_s and each.end_s < first.end_s]
        assert [each.key.name for each in during if each.key.unit == "first"].count("forward") >= 2


def die_in_flight(ctx: RankContext, config: ShardConfig, rounds: Rounds) -> None:
    trained = start(config, rounds)
    comm = trained[1].internals.groups.island.outer_comm
    (transport,) = {*comm.transports}
    barrier = transport.barrier

    def killed(tag: int) -> None:
        if ctx.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier(tag)

    transport.barrier = killed
    for step in range(rounds.steps):
        run_step(ctx, rounds, trained, step)


def test_a_rank_that_dies_while_it_sends_ends_the_job_with_a_message(ranks: RankPool) -> None:
    rounds = Rounds(every=2, steps=6, delay=1)
    with pytest.raises(RankError) as failure:
        ranks(4, die_in_flight, config_of("ddp", rounds, 2), rounds)
    errors = [error for rank, error in failure.value.by_rank.items() if rank != 3]
    assert any(isinstance(error, CommunicationError) for error in errors), failure.value
    assert any("outer step of" in str(error) for error in errors), failure.value


def test_the_summary_at_start_names_fragments_and_delay(ranks: RankPool) -> None:
    rounds = Rounds(every=4, steps=4, fragments=3, delay=2)
    found = ranks(4, train, config_of("mics", rounds, 2), rounds)[0]
    sent = [sum(row.sent_bytes for row in rows if row.axis == "inter_node") for _, rows in found]
    text = ranks(4, report_of, config_of("mics", rounds, 2), rounds)[0]
    assert (
        f"every 4 steps an outer step sends {sum(sent) / 1e3:.3g} kB, at most {max(sent) / 1e3:.3g} kB at a time, in 3 "
        "fragments, and ends 2 steps later. This is not the algorithm of synchronous training." in text
    )
