"""Does a profile record what ranks do, name the slowest one, and leave the training as it was?"""

import contextlib
import itertools
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

from mics_strategy import ConfigError, LifecycleError, ShardConfig, Sharded, Topology, save_checkpoint, shard
from mics_strategy.comm import ranges as ranges_module
from mics_strategy.errors import CommunicationError, MiCSError
from mics_strategy.timeline import Category, Interval, Timeline
from tests import models
from tests.engine.events import recorded
from tests.engine.test_frames import stacks_to_the_wire
from tests.ranks import RankContext, RankPool, assert_refused, refusal

NODES = Topology(ranks_per_node=2)
SLOW_S = 0.15
WIDTH = 8
CONTROL = ("used parameters", "buffers")  # payloads that are no units


@dataclass(slots=True)
class Training:
    """A small sharded transformer."""

    rank: int
    case: models.Case = field(default_factory=models.transformer)
    preset: str = "mics"
    model: nn.Module = field(init=False)
    sharded: Sharded = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    num_batches: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.case.build()
        config = ShardConfig.preset(self.preset, topology=NODES, hierarchical=True)
        self.sharded = shard(self.model, config, units=self.case.units)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self) -> Tensor:
        self.num_batches += 1
        return self.case.loss(self.model, self.case.batch(self.num_batches, 0, self.rank))

    def step(self, micro_steps: int = 1) -> None:
        for _ in range(micro_steps):
            self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def names(intervals: list[Interval], *categories: Category) -> list[str]:
    """The work of some categories in its order, without repetition."""
    named = [str(interval.key) for interval in intervals if interval.key.category in categories]
    return [name for name, _ in itertools.groupby(named)]


# -- what is recorded ----------------------------------------------------------------------------------------


def events_and_rows(ctx: RankContext, preset: str) -> tuple[list[str], Timeline]:
    training = Training(ctx.rank, preset=preset)
    layers = tuple({type(unit.module) for unit in training.sharded.internals.units[1:]})
    training.step()
    training.step()
    profile = training.sharded.profile(steps=1)
    with recorded(training.model, layers) as events:
        training.step()
    return list(events), profile.result.timeline


@pytest.mark.parametrize("preset", ["mics", "zero1", "ddp"])
def test_collectives_and_waits_are_those_that_spies_see(ranks: RankPool, preset: str) -> None:
    for rank, (events, timeline) in enumerate(ranks(4, events_and_rows, preset, ranks_per_node=2)):
        compute, *others = timeline.rows_of(rank)
        collectives = [interval for row in others if row.resource != "control" for interval in row.intervals]
        submitted = sorted(collectives, key=lambda interval: interval.submitted_s)
        started = [event.removeprefix("start ") for event in events if event.startswith("start")]
        assert [f"{interval.key.name} {interval.key.unit}" for interval in submitted] == started
        waited = [event.removeprefix("wait ") for event in events if event.startswith("wait")]
        waits = [interval.key for interval in compute.intervals if interval.key.category is Category.WAIT]
        assert [f"{key.name} {key.unit}" for key in waits if key.unit not in CONTROL] == waited
        assert all(interval.sent_bytes > 0 for interval in collectives)
        assert {interval.key.axis for interval in collectives} <= {"intra_node", "inter_node", "intra_node+inter_node"}


def test_units_run_forward_and_backward_in_the_order_that_spies_see(ranks: RankPool) -> None:
    events, timeline = ranks(4, events_and_rows, "mics", ranks_per_node=2)[0]
    intervals = list(timeline.rows_of(0)[0].intervals)
    layers = {event.split()[1] for event in events if event.startswith("forward")}
    for name in ("forward", "backward"):
        ran = names([i for i in intervals if i.key.name == name and i.key.unit in layers], Category.COMPUTE)
        assert ran == [event for event in events if event.startswith(name)]
    order = [name for name, _ in itertools.groupby(interval.key.category for interval in intervals)]
    assert order[0] is Category.DATA
    assert Category.OPTIMIZER in order


def reductions_by_step(ctx: RankContext) -> list[int]:
    """Job: recorded reductions of three steps, before the last of which the codec of gradients goes off."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    options = {"grad_codec": "int8", "grad_codec_until": 0.5, "training_steps": 4}
    sharded = shard(model, ShardConfig.preset("mics", topology=NODES, **options), units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for _ in range(3):
        profile = sharded.profile(steps=1)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        rows = profile.result.timeline.rows_of(ctx.rank)[1:]
        counts.append(sum(i.key.name == "reduce_scatter" for row in rows for i in row.intervals))
    return counts


def test_collectives_of_a_codec_that_goes_off_are_recorded(ranks: RankPool) -> None:
    for counts in ranks(4, reductions_by_step, ranks_per_node=2):
        assert counts == counts[:1] * 3
        assert counts[0] > 0


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of the host's clock, by the test, around what a profile of two steps records; and its row."""

    before_profile: int
    after_profile: int
    step_bodies: list[int]  # of all steps: the end of what is inside their hooks
    step_calls: list[int]  # their returns
    row: tuple[Interval, ...]
    parts_s: float
    step_s: float


def times_around_steps(ctx: RankContext) -> Times:
    training = Training(ctx.rank)
    bodies, calls, now = list[int](), list[int](), time.perf_counter_ns
    # torch calls it after the body of a step; hooks come later, when the profile has been made
    training.optimizer._optimizer_step_code = lambda: bodies.append(now())  # type: ignore[method-assign]
    training.step()
    before_profile = now()
    profile = training.sharded.profile(steps=2)
    after_profile = now()
    for _ in range(2):
        time.sleep(0.1)
        training.step(micro_steps=2)
        calls.append(now())
    timeline = profile.result.timeline
    parts_s = 2 * sum(part.seconds for part in timeline.parts(ctx.rank))
    row = timeline.rows_of(ctx.rank)[0].intervals
    return Times(before_profile, after_profile, bodies[1:], calls, row, parts_s, 2 * profile.result.step_s)


def test_parts_add_up_to_the_measured_step(ranks: RankPool) -> None:
    """What is recorded lies between times that the test takes just inside and just outside it."""
    for times in ranks(4, times_around_steps, ranks_per_node=2):
        start_s, end_s = times.row[0].start_s, times.row[-1].end_s
        assert [times.parts_s, times.step_s] == pytest.approx([end_s - start_s] * 2, rel=1e-6)  # the same intervals
        behind_update = itertools.dropwhile(lambda interval: interval.key.category is not Category.OPTIMIZER, times.row)
        second_start_s = next(interval.start_s for interval in behind_update if interval.key.category is Category.DATA)
        recorded_s = [second_start_s - start_s, end_s - start_s]
        for seconds, body, call in zip(recorded_s, times.step_bodies, times.step_calls, strict=True):
            assert (body - times.after_profile) * 1e-9 <= seconds <= (call - times.before_profile) * 1e-9


class Recomputed(nn.Module):
    """Two layers; the first is recomputed in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x.requires_grad_(), use_reentrant=False))


def every_loop(ctx: RankContext) -> dict[str, list[str]]:
    """What the compute row holds, loop by loop."""
    found: dict[str, list[str]] = {}

    def run(name: str, sharded: Sharded, loop: Callable[[], object], steps: int = 1) -> None:
        profile = sharded.profile(steps=steps)
        loop()
        row = profile.result.timeline.rows_of(ctx.rank)[0]
        shown = (Category.COMPUTE, Category.DATA, Category.OPTIMIZER, Category.IDLE)
        found[name] = [item for item in names(list(row.intervals), *shown) if item != "engine"]

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    sharded = shard(model, ShardConfig.preset("mics", topology=NODES), units=[nn.Linear])
    halves = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    x = torch.ones(2, WIDTH)

    def backward() -> None:
        model(x).sum().backward()

    def step() -> None:
        for optimizer in halves:
            optimizer.step()
            optimizer.zero_grad()

    def two_optimizers() -> None:
        for _ in range(2):
            backward()
            step()

    def accumulation() -> None:
        backward()
        backward()
        step()

    def evaluation() -> None:
        with torch.no_grad():
            model(x)
        accumulation()

    def closure() -> None:
        both = torch.optim.SGD(model.parameters(), lr=0.1)

        def evaluate() -> Tensor:
            loss = model(x).sum()
            loss.backward()
            return loss

        both.step(evaluate)
        both.zero_grad()

    def failing() -> None:
        with contextlib.suppress(ZeroDivisionError):
            handle = model[0].register_forward_hook(lambda *_: 1 / 0)
            try:
                model(x)
            finally:
                handle.remove()
        backward()
        step()

    backward()
    step()
    run("accumulation", sharded, accumulation)
    run("evaluation", sharded, evaluation)
    run("closure", sharded, closure)
    run("failing", sharded, failing)
    run("two optimizers", sharded, two_optimizers, steps=2)
    other = Recomputed()
    other_sharded = shard(other, ShardConfig.preset("mics", topology=NODES), units=[nn.Linear])
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def recomputing() -> None:
        other(x).sum().backward()
        optimizer.step()

    recomputing()
    run("recomputing", other_sharded, recomputing)
    return found


MICRO_STEP = ["forward 0", "forward 1", "loss", "backward 1", "backward 0"]
STEP_END = ["between backward and step", "step"]
LOOPS = {
    "accumulation": ["data", *MICRO_STEP, "data", *MICRO_STEP, *STEP_END],
    "evaluation": ["data", "forward 0", "forward 1", "data", *MICRO_STEP, "data", *MICRO_STEP, *STEP_END],
    "closure": ["data", *MICRO_STEP, "step"],
    "failing": ["data", "forward 0", "data", *MICRO_STEP, *STEP_END],
    "two optimizers": ["data", *MICRO_STEP, *STEP_END, *STEP_END, "data", *MICRO_STEP, *STEP_END],
    "recomputing": [
        *("data", "forward first", "forward second", "loss", "backward second"),
        *("recompute first", "backward first", *STEP_END),
    ],
}


def test_every_loop_is_cut_into_its_parts(ranks: RankPool) -> None:
    for found in ranks(4, every_loop, ranks_per_node=2):
        assert {name: without_root(row) for name, row in found.items()} == LOOPS


def without_root(row: list[str]) -> list[str]:
    """A row without the intervals of the root, which has no parameters in these models."""
    return [name for name, _ in itertools.groupby(name for name in row if "(root)" not in name)]


def skipped_step(ctx: RankContext) -> tuple[int, list[str]]:
    training = Training(ctx.rank)
    training.step()
    profile, scaler = training.sharded.profile(steps=1), GradScaler("cpu", init_scale=8.0)
    for factor in (math.inf, 1.0):
        scaler.scale(training.loss() * factor).backward()
        scaler.step(training.optimizer)
        left = profile.steps_left
        scaler.update()
        training.optimizer.zero_grad()
        if factor != 1.0:
            assert left == 1
    row = profile.result.timeline.rows_of(ctx.rank)[0]
    return profile.steps_left, names(list(row.intervals), Category.OPTIMIZER, Category.DATA)


def test_a_step_that_a_scaler_skips_is_part_of_the_next(ranks: RankPool) -> None:
    assert ranks(4, skipped_step, ranks_per_node=2) == [(0, ["data", "step"])] * 4


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # preset, options
    "mics": ("mics", {"grad_codec": "int8"}),
    "int8": ("zero3", {"weight_codec": "int8", "grad_codec": "int4", "codec_links": "all"}),
    "hpz": ("zeropp-hpz", {"prefetch": 2}),
    "owners": ("zero1", {"optimizer_layout": "tensors"}),
    "second hop": ("mics", {"second_hop": "micro_step"}),
    "no overlap": ("paro-iig", {"overlap": "none"}),
    "codec ends": (
        "zero3",
        {"grad_codec": "int8", "codec_links": "all", "grad_codec_until": 0.5, "training_steps": 4},
    ),
}


def with_options(ctx: RankContext, preset: str, options: dict[str, Any]) -> tuple[int, int, float]:
    """Bytes of the traffic log in the last step; of the profile in that step; seconds that its parts lack."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    sharded = shard(model, ShardConfig.preset(preset, topology=NODES, **options), units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        profile = sharded.profile(steps=1)
        for _ in range(2):
            model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    timeline = profile.result.timeline
    recorded_bytes = sum(i.sent_bytes for row in timeline.rows_of(ctx.rank) for i in row.intervals)
    lacking = timeline.step_s(ctx.rank) - sum(part.seconds for part in timeline.parts(ctx.rank))
    return sum(row.sent_bytes for row in sharded.traffic()), recorded_bytes, lacking


@pytest.mark.wide(every=2)
@pytest.mark.one_job
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_byte_of_the_traffic_log_is_recorded(ranks: RankPool, variant: str) -> None:
    for issued_bytes, recorded_bytes, lacking in ranks(4, with_options, *VARIANTS[variant], ranks_per_node=2):
        assert recorded_bytes == issued_bytes > 0
        assert lacking == pytest.approx(0.0, abs=1e-6)


# -- the slowest rank ----------------------------------------------------------------------------------------


def with_slow_rank(ctx: RankContext, where: str, slow: int) -> tuple[str, str, int]:
    training = Training(ctx.rank)
    training.step()
    profile = training.sharded.profile(steps=3)

    def pause(*_: object) -> None:
        time.sleep(SLOW_S if ctx.rank == slow else 0.0)

    last = training.sharded.internals.units[-1].module
    if where == "forward":
        next(iter(last.children())).register_forward_pre_hook(pause)
    if where == "backward":
        next(iter(last.children())).register_full_backward_hook(pause)
    if where == "step":
        training.optimizer.step = _paused(training.optimizer.step, pause)  # type: ignore[method-assign]
    for _ in range(3):
        if where == "data":
            pause()
        training.step()
    slowest = profile.result.slowest
    assert slowest is not None
    return slowest.reason.name, slowest.reason.category.value, slowest.rank


def _paused(step: Callable[..., Any], pause: Callable[[], None]) -> Callable[..., Any]:
    def paused(*args: Any, **kwargs: Any) -> Any:
        pause()
        return step(*args, **kwargs)

    return paused


@pytest.mark.one_job
@pytest.mark.parametrize(
    ("where", "slow", "part"),
    [
        ("data", 2, ("data", "data")),
        ("forward", 1, ("forward", "compute")),
        ("backward", 3, ("backward", "compute")),
        ("step", 0, ("between backward and step", "idle")),
    ],
)
def test_the_slowed_rank_is_named_with_its_reason(
    ranks: RankPool, where: str, slow: int, part: tuple[str, str]
) -> None:
    assert ranks(4, with_slow_rank, where, slow, ranks_per_node=2) == [(*part, slow)] * 4


# -- results and errors --------------------------------------------------------------------------------------


def traced(ctx: RankContext, folder: Path) -> tuple[str, str]:
    training = Training(ctx.rank)
    profile = training.sharded.profile(steps=2, path=folder / "trace.json")
    training.step()
    training.step()
    result = profile.result
    assert sum(result.metrics().values()) == pytest.approx(2 * result.step_s)
    return result.table(planned=result.timeline), result.summary()


def test_the_trace_holds_every_rank_beside_each_other(ranks: RankPool, tmp_path: Path) -> None:
    tables = ranks(4, traced, tmp_path, ranks_per_node=2)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [f"rank {rank} recorded" for rank in range(4)]
    for event in events:
        assert {"ph", "pid", "tid", "name", "args"} <= event.keys()
        assert event["ph"] == "M" or (event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0)
    compute = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    begins = {rank: min(e["ts"] for e in compute if e["pid"] == rank) for rank in range(4)}
    ends = {rank: max(e["ts"] + e["dur"] for e in compute if e["pid"] == rank) for rank in range(4)}
    assert max(begins.values()) < min(ends.values()), "the clocks of ranks agree"
    for table, summary in tables:
        assert "differs" not in table
        assert re.fullmatch(r"Profiled 2 steps of [\d.]+ ms. Rank \d is the slowest: .*", summary)


def mistakes(ctx: RankContext, path: str) -> list[object]:
    training = Training(ctx.rank)
    profile = training.sharded.profile
    refused = [
        refusal(ctx, lambda _, value=value: profile(steps=value))  # type: ignore[misc]
        for value in (0, True, 1.5, 1 + ctx.rank // 3)
    ]
    refused += [refusal(ctx, lambda _: profile(path="trace.txt")), refusal(ctx, lambda _: profile(path=path))]
    running = profile(steps=3)
    refused.append(refusal(ctx, lambda _: profile()))
    refused.append(refusal(ctx, lambda _: running.stop()))
    again = profile(steps=3)
    training.step()
    refused.append(refusal(ctx, lambda _: again.result))
    stopped = again.stop()
    assert stopped is again.stop() is again.result
    assert (stopped.num_steps, again.steps_left) == (1, 0)
    return refused


EXPECTED = [
    (ConfigError, r"steps=0"),
    (ConfigError, r"steps=True"),
    (ConfigError, r"steps=1.5"),
    (ConfigError, r"`steps` differs between ranks: 1 on rank 0, 2 on rank 3"),
    (ConfigError, r"does not end in .json"),
    (ConfigError, r"folder cannot be made .* \(found on rank 0\)"),
    (LifecycleError, r"being profiled: 3 steps are left"),
    (LifecycleError, r"No step ended"),
    (LifecycleError, r"2 of 3 steps are left"),
]


def test_mistakes_are_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    by_rank = ranks(4, mistakes, str(tmp_path / "file" / "trace.json"), ranks_per_node=2)
    for errors, (error_type, match) in zip(zip(*by_rank, strict=True), EXPECTED, strict=True):
        assert_refused(errors, error_type, match)


def profile_on_one_rank(ctx: RankContext, path: str) -> MiCSError | None:
    training = Training(ctx.rank)

    def disagree(ctx: RankContext) -> None:
        if ctx.rank:
            training.sharded.profile()
        else:
            save_checkpoint(path, training.sharded)

    return refusal(ctx, disagree)


def test_ranks_that_do_not_profile_are_named(ranks: RankPool, tmp_path: Path) -> None:
    """One saves a checkpoint while the other one begins a profile."""
    errors = ranks(2, profile_on_one_rank, str(tmp_path / "checkpoint"), ranks_per_node=2)
    assert_refused(errors, CommunicationError, r"in different functions.* on rank 0, `begin_profile` on rank 1")


# -- the training is unchanged -------------------------------------------------------------------------------


def with_and_without(ctx: RankContext) -> tuple[bool, bool, list[str]]:
    """Whether parameters and stacks are equal with and without a profile; methods that are left replaced."""

    def train(is_profiled: bool) -> tuple[Training, list[list[str]]]:
        training = Training(ctx.rank)
        training.step()
        if is_profiled:
            profile = training.sharded.profile(steps=2)
        for _ in range(2):
            training.step(micro_steps=2)
        if is_profiled:
            assert profile.result.num_steps == 2
        with stacks_to_the_wire() as stacks:
            training.step()
        return training, [stack for stack in stacks if stack[-1] != "queue.py:_run_queue"]

    plain, stacks = train(False)
    profiled, stacks_after = train(True)
    values = zip(plain.sharded.internals.parameters, profiled.sharded.internals.parameters, strict=True)
    equal = all(torch.equal(one.to_local(), other.to_local()) for one, other in values)
    owners = [profiled.sharded._engine, profiled.sharded._target, profiled.sharded]
    left = [name for owner in owners for name in vars(owner) if callable(getattr(type(owner), name, None))]
    return equal, stacks == stacks_after, left


def test_a_profile_leaves_values_stacks_and_methods_as_they_were(ranks: RankPool) -> None:
    assert ranks(4, with_and_without, ranks_per_node=2) == [(True, True, [])] * 4


def failed_steps(ctx: RankContext, where: str) -> tuple[bool, bool, list[str]]:
    """A recorded step fails and is recorded again, another one fails and the profile is cancelled, a third is plain.

    Returns whether something listens before and after `cancel`, and what the compute row has of the repeated step.
    """
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    sharded = shard(model, ShardConfig.preset("mics", topology=NODES), units=[nn.Linear])
    optimizer, x, is_failing = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, WIDTH), False

    def fail(*_: object) -> None:
        if is_failing:
            raise ZeroDivisionError

    if where == "forward":
        model[0].register_forward_hook(fail)
    if where == "backward":
        model[1].register_full_backward_hook(fail)
    if where == "step":
        optimizer.register_step_pre_hook(fail)

    def step() -> None:
        with contextlib.suppress(ZeroDivisionError):
            model(x).sum().backward()
            optimizer.step()
        optimizer.zero_grad()

    step()
    profile = sharded.profile(steps=1)
    is_failing = True
    step()
    is_failing = False
    step()
    row = names(list(profile.result.own_rows[0].intervals), Category.COMPUTE, Category.OPTIMIZER)
    profile = sharded.profile(steps=1)
    is_failing = True
    step()
    ranges = sharded.internals.engine.ranges
    listened = ranges.recorder is not None
    profile.cancel()
    listens = ranges.recorder is not None
    is_failing = False
    step()
    return listened, listens, without_root(row)


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_step_that_fails_leaves_nothing_behind(ranks: RankPool, where: str) -> None:
    for listened, listens, row in ranks(4, failed_steps, where, ranks_per_node=2):
        assert listened
        assert not listens
        assert row[-5:] == [*MICRO_STEP, "step"][-5:]


# -- other profilers -----------------------------------------------------------------------------------------


def in_torch_profiler(ctx: RankContext, is_recorded: bool) -> tuple[set[str], list[bool]]:
    """The ranges of one step in torch's profiler; whether something listens behind it and behind the next step."""
    training = Training(ctx.rank)
    training.step()
    engine_ranges = training.sharded.internals.engine.ranges
    if is_recorded:
        training.sharded.profile(steps=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        training.step()
    listens = [engine_ranges.recorder is not None]
    with mock.patch.object(ranges_module, "_enter_range") as enter:
        training.step()
        assert not enter.called
    listens.append(engine_ranges.recorder is not None)
    return {event.key for event in profiler.key_averages() if event.key.startswith("mics::")}, listens


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "alone"])
def test_torch_profiler_shows_units_and_collectives(ranks: RankPool, is_recorded: bool) -> None:
    unit = models.transformer().build()
    layer = next(name for name, module in unit.named_modules() if isinstance(module, models.transformer().units))
    for ranges, listens in ranks(4, in_torch_profiler, is_recorded, ranks_per_node=2):
        assert {f"mics::forward {layer}", f"mics::backward {layer}", "mics::step"} <= ranges
        assert ("mics::data" in ranges) == is_recorded
        assert f"mics::wait all_gather {layer} [intra_node]" in ranges
        assert listens == [not is_recorded, False]


Span = tuple[float, float, str]


def spans_of(profiler: torch.profiler.profile, file: Path, prefixes: tuple[str, ...]) -> list[Span]:
    """Begin, end and name of the ranges with these prefixes, the outer one first."""
    profiler.export_chrome_trace(str(file))
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["name"].startswith(prefixes)]
    found = [(event["ts"], event["ts"] + event["dur"], event["name"]) for event in events if event["ph"] == "X"]
    return sorted(found, key=lambda span: (span[0], -span[1]))


def with_own_ranges(ctx: RankContext, folder: Path) -> list[Span]:
    """The engine's ranges in torch's profiler, among those of a script."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    shard(model, ShardConfig.preset("mics", topology=NODES), units=[nn.Linear])
    forward = model[0].forward

    def named_forward(x: Tensor) -> Tensor:
        with torch.profiler.record_function("own forward"):
            return forward(x)

    model[0].forward = named_forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            with torch.profiler.record_function("own loss"):
                loss = model(torch.ones(2, WIDTH)).sum()
            with torch.profiler.record_function("own backward"):
                loss.backward()
            with torch.profiler.record_function("own step"):
                optimizer.step()
            optimizer.zero_grad()
    return spans_of(profiler, folder / f"{ctx.rank}.json", ("mics::", "own "))


def test_ranges_are_nested_in_each_other_and_in_those_of_a_script(ranks: RankPool, tmp_path: Path) -> None:
    for spans in ranks(2, with_own_ranges, tmp_path, ranks_per_node=2):
        paths, open_spans = [], list[Span]()
        for span in spans:
            while open_spans and open_spans[-1][1] <= span[0]:
                open_spans.pop()
            assert not open_spans or span[1] <= open_spans[-1][1], (open_spans[-1], span)
            open_spans.append(span)
            paths.append([name for _, _, name in open_spans])
        assert paths.count(["own loss", "mics::forward (root)", "mics::forward 0", "own forward"]) == 2
        assert paths.count(["own backward", "mics::backward 1"]) >= 2
        assert paths.count(["own step", "mics::step"]) >= 2


def in_and_around_profiles(ctx: RankContext, folder: Path) -> tuple[list[str], list[str]]:
    """Torch's profiler begins before a profile, and ends in it. Returns the row of the profile, and of the trace."""
    training = Training(ctx.rank)
    training.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        training.step()
        profile = training.sharded.profile(steps=2)
        training.step()
    training.step()
    spans = spans_of(profiler, folder / f"{ctx.rank}.json", ("mics::forward (root)", "mics::step"))
    row = names(list(profile.result.own_rows[0].intervals), Category.COMPUTE, Category.OPTIMIZER)
    return [name for name in row if name in ("loss", "step")], [name for _, _, name in spans]


def test_torch_profiler_and_a_profile_may_begin_and_end_in_any_order(ranks: RankPool, tmp_path: Path) -> None:
    for row, spans in ranks(2, in_and_around_profiles, tmp_path, ranks_per_node=2):
        assert row == ["loss", "step"] * 2
        assert [name for name, _ in itertools.groupby(spans)] == ["mics::forward (root)", "mics::step"] * 2
