"""Coalesced collectives equal those of flat buffers.

Simulated ranks, real values.
"""

import collections
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mics_strategy import ConfigError, ShardConfig, Topology
from mics_strategy.comm.communicator import CoalescedCommunicator, RowViews
from mics_strategy.comm.transport import BackendTransport
from mics_strategy.comm.work import Work
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.layout import make_layout
from mics_strategy.engine.streams import OpChain
from mics_strategy.tuning import coalesce as coalescing
from tests import models
from tests.engine.training import Outcome, Run, assert_same, plain, start, train
from tests.models import Case
from tests.ranks import RankContext, RankPool, raises_on_every_rank, simulate
from tests.reference import Batch

Counts = collections.Counter[str]
MOVERS = ("all_gather_coalesced", "reduce_scatter_coalesced", "all_gather", "exchange")
PRESETS = ("mics", "zero1", "zero2", "zero3", "zeropp-hpz", "paro-iig", "paro-nii", "paro-ing")


@contextmanager
def counted() -> Iterator[Counts]:
    """How often each way to move tensors is used, on any rank."""
    counts: Counts = collections.Counter()

    def counting(name: str) -> Callable[..., Any]:
        method = getattr(BackendTransport, name)

        def count(*arguments: Any) -> Any:
            counts[name] += 1
            return method(*arguments)

        return count

    with mock.patch.multiple(BackendTransport, **{name: counting(name) for name in MOVERS}):
        yield counts


def _train(ctx: RankContext, run: Run) -> Outcome:
    return train(ctx, run)


def run_of(preset: str, case: Case = models.transformer, **options: Any) -> Run:
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=2), **options)
    return Run(case=case, config=config, steps=2, accumulation=2)


class Even(nn.Module):
    """First dimensions that 4 and 8 divide.

    One layer is used by some ranks only, one twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(16, 16)
        self.sometimes = nn.Linear(16, 16)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.sometimes(x) if uses_all else x


class EvenAndUneven(nn.Module):
    """Two such units, and a root that takes the flat form."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Even(), Even(), nn.Linear(16, 3)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        return self.head(self.second(self.first(x, uses_all), uses_all))


def even() -> Case:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return EvenAndUneven()

    def batch(step: int, micro: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        x, y = torch.randn(4, 16, generator=generator), torch.randn(4, 3, generator=generator)
        return {"x": x, "y": y, "uses_all": step != 1 and (micro + rank) % 2 == 0}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"], batch["uses_all"]), batch["y"])

    return Case(build=build, batch=batch, loss=loss, units=(Even,))


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", PRESETS)
def test_coalesced_training_equals_plain_with_one_launch_for_a_unit(preset: str) -> None:
    run = run_of(preset, coalesce=True)
    trace = plain(run, 4)
    with counted() as counts:
        outcomes = simulate(4, _train, run, ranks_per_node=2)
    for outcome in outcomes:
        assert outcome.grad_norms == pytest.approx(trace.grad_norms, rel=1e-5)
        assert_same(outcome.grads[-1], trace.grads[-1])
        assert_same(outcome.parameters, trace.parameters)
    assert counts["all_gather_coalesced"]
    assert bool(counts["reduce_scatter_coalesced"]) is (run.config.grads != "replicate")


@pytest.mark.wide
@pytest.mark.parametrize("preset", ["mics", "zero2", "zero3", "paro-iig"])
@pytest.mark.parametrize("per_node", [2, 4], ids=["2x4", "4x2"])
def test_unevenly_divisible_units_use_the_flat_buffer(preset: str, per_node: int) -> None:
    run = run_of(preset, even, coalesce=True).replace(steps=3)
    run = run.replace(config=run.config.replace(topology=Topology(ranks_per_node=per_node)))
    trace = plain(run, 8)
    with counted() as counts:
        outcomes = simulate(8, _train, run, ranks_per_node=per_node)
    for outcome in outcomes[::7]:
        assert outcome.grad_norms == pytest.approx(trace.grad_norms, rel=1e-5)
        assert_same(outcome.grads[-1], trace.grads[-1])
        assert_same(outcome.parameters, trace.parameters)
    assert (
        min(counts[name] for name in ("all_gather_coalesced", "all_gather", "reduce_scatter_coalesced", "exchange")) > 0
    )


@pytest.mark.parametrize("preset", ["mics", "zero3"])
def test_the_same_bytes_are_planned_and_issued_and_the_same_numbers_computed(preset: str) -> None:
    coalesced, flat = (
        simulate(4, _memory_by_purpose, run_of(preset, coalesce=coalesce), ranks_per_node=2)
        for coalesce in (True, False)
    )
    for (parameters, rows), (flat_parameters, flat_rows) in zip(coalesced, flat, strict=True):
        assert_same(parameters, flat_parameters)
        assert rows == flat_rows
        assert all(row.planned_bytes == row.sent_bytes > 0 for row in rows)


def _memory_by_purpose(ctx: RankContext, run: Run) -> tuple[dict[str, Tensor], object]:
    training = start(ctx, run)
    for step in range(3):
        training.step(step)
    return training.parameters(), training.sharded.traffic()


def test_narrow_gradients_are_summed_in_one_launch() -> None:
    options = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    with counted() as counts:
        one = simulate(4, _train, run_of("mics", coalesce=True, **options), ranks_per_node=2)
    assert counts["reduce_scatter_coalesced"]
    other = simulate(4, _train, run_of("mics", coalesce=False, **options), ranks_per_node=2)
    for name, value in one[0].parameters.items():
        assert torch.allclose(value, other[0].parameters[name], atol=2e-3)


def test_gradients_not_in_the_wire_dtype_are_copied_and_parameters_are_not() -> None:
    with counted() as counts:
        simulate(4, _train, run_of("mics", coalesce=True, param_dtype="bfloat16"), ranks_per_node=2)
    assert counts["all_gather_coalesced"]
    assert not counts["reduce_scatter_coalesced"]


def test_coalesced_units_allocate_no_flat_buffer() -> None:
    def staging_bytes(ctx: RankContext, run: Run) -> int:
        return start(ctx, run).sharded.memory.bytes_by_purpose.get("all-gather staging buffers", 0)

    coalesced, flat = (simulate(2, staging_bytes, run_of("mics", coalesce=coalesce)) for coalesce in (True, False))
    assert max(coalesced) < min(flat)  # the root is not even


ALL_ENCODED = {"weight_codec": "int8", "grad_codec": "int8", "codec_links": "all"}


@pytest.mark.parametrize("options", [{"case": models.mlp}, ALL_ENCODED], ids=["uneven", "encoded"])
def test_coalescing_is_refused_where_nothing_can_be_coalesced(options: dict[str, Any]) -> None:
    run = run_of("mics", coalesce=True, **options)
    raises_on_every_rank(
        lambda: simulate(4, _train, run, ranks_per_node=2), ConfigError, "no unit of this model can use coalesced"
    )


def _refused(ctx: RankContext) -> str:
    with pytest.raises(ConfigError, match="a backend other than gloo") as refused:
        start(ctx, run_of("mics", coalesce=True))
    return str(refused.value)


def test_gloo_refuses_coalescing_on_every_rank(ranks: RankPool) -> None:
    assert len(set(ranks(2, _refused))) == 1


@pytest.mark.parametrize("value", [None, 1, "yes", "none"])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="coalesce"):
        ShardConfig(coalesce=value)


def _choose(ctx: RankContext, run: Run) -> list[tuple[bool, bool]]:
    units = start(ctx, run).sharded._engine.units
    return [(b.spec.coalesce_all_gather, b.spec.coalesce_reduce_scatter) for unit in units for b in unit.buckets]


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_faster_way_is_chosen_printed_and_cached(
    is_faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(coalescing, "backend_key", lambda group, device: "threads")
    measured: list[str] = []

    def measure(question: coalescing.Candidate, *arguments: Any) -> coalescing.Measurement:
        answer = real(question, *arguments)
        assert min(answer.flat_s, answer.coalesced_s) > 0
        measured.append(question.role)
        return coalescing.Measurement(flat_s=2.0, coalesced_s=1.0 if is_faster else 3.0)

    real = coalescing.benchmark
    monkeypatch.setattr(coalescing, "benchmark", measure)
    run = run_of("mics", even)
    expected = [(False, False), (is_faster, is_faster), (is_faster, is_faster)]
    assert simulate(2, _choose, run, ranks_per_node=2) == [expected] * 2
    # Two ranks; units of equal shapes once.
    assert sorted(measured) == ["grad_reduce_scatter"] * 2 + ["param_all_gather"] * 2
    said = capsys.readouterr().out
    chosen = "one launch" if is_faster else "flat"
    assert said.count(f"of 4 tensors, 2,176 B: {chosen}, measured now") == 2
    assert simulate(2, _choose, run, ranks_per_node=2) == [expected] * 2  # another job
    assert len(measured) == 4
    assert capsys.readouterr().out.count(f"{chosen}, measured by an earlier job") == 2


def test_one_and_two_stages_are_measured_separately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(coalescing, "backend_key", lambda group, device: "threads")
    real, measured = coalescing.benchmark, []

    def watched(question: coalescing.Candidate, *arguments: Any) -> coalescing.Measurement:
        measured.append((question.role, question.num_stages))
        return real(question, *arguments)

    monkeypatch.setattr(coalescing, "benchmark", watched)
    for hierarchical in (True, False, True):
        simulate(4, _choose, run_of("zero3", even, hierarchical=hierarchical), ranks_per_node=2)
    assert sorted(set(measured)) == [
        (role, stages) for role in ("grad_reduce_scatter", "param_all_gather") for stages in (1, 2)
    ]
    assert len(measured) == 4 * 4  # ranks; the third job asks for nothing


def test_nothing_is_measured_where_times_are_meaningless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalescing, "benchmark", None)
    assert simulate(2, _choose, run_of("mics", even), ranks_per_node=2) == [[(False, False)] * 3] * 2


def test_gradients_that_arrive_twice_are_added_in_the_flat_buffer() -> None:
    collect, run = GradBucket.add, run_of("mics", even, coalesce=True)
    trace = plain(run, 4)

    def in_halves(self: GradBucket, position: int, grad: Tensor) -> None:
        for _ in range(2):
            collect(self, position, grad / 2)

    with counted() as counts, mock.patch.object(GradBucket, "add", in_halves):
        [outcome, *_] = simulate(4, _train, run, ranks_per_node=2)
    assert counts["reduce_scatter_coalesced"]
    assert_same(outcome.parameters, trace.parameters)


def test_a_reduction_keeps_its_gradients_alive() -> None:
    real, is_kept_alive = CoalescedCommunicator.reduce_scatter, []

    def watched(self: CoalescedCommunicator, out: Tensor, fulls: list[Tensor], *arguments: Any) -> Work:
        handle = real(self, out, fulls, *arguments)
        is_kept_alive.append(handle.keepalive == fulls and len(fulls) > 0)
        return handle

    with mock.patch.object(CoalescedCommunicator, "reduce_scatter", watched):
        simulate(2, _train, run_of("mics", coalesce=True))
    assert is_kept_alive
    assert all(is_kept_alive)


def test_gradients_are_kept_alive_until_the_reduction_is_waited_for() -> None:
    kept = [torch.zeros(3)]
    gradient = weakref.ref(kept[0])
    chain = OpChain()
    chain.add(Work("a sum", None).keep_alive(kept))
    del kept
    gc.collect()
    assert gradient() is not None
    chain.wait()
    assert gradient() is None


def test_extents_of_several_rows_cover_every_row_of_a_tensor() -> None:
    slice_ = torch.arange(12.0)
    first, second = RowViews(2, [(0, 2), (3, 1)], torch.float32).views(slice_)
    assert first.tolist() == [[0, 1], [6, 7]]
    assert second.tolist() == [[3], [9]]


@pytest.mark.parametrize(
    ("shapes", "is_even"),
    [([(8, 3), (4,)], True), ([(8, 3), (6,)], False), ([(8, 3), ()], False), ([(3, 8)], False), ([(0, 8)], False)],
    ids=str,
)
def test_a_bucket_is_evenly_divisible_if_all_its_parameters_are(shapes: list[tuple[int, ...]], is_even: bool) -> None:
    assert make_layout([(str(shape), torch.Size(shape)) for shape in shapes], 4).is_evenly_divisible is is_even
