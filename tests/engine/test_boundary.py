"""The last micro-step of a step that declares nothing is predicted; a wrong prediction changes no sum."""

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, Sharded, Topology, shard
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.rank_agreement import AccumulationWindow
from mics_strategy.engine.reducer import Reducer
from mics_strategy.engine.schedule import NONE_REPEATED, RepeatedHop, RepeatedHops
from tests import models
from tests.engine import unusual
from tests.engine.events import recorded
from tests.engine.training import wholes
from tests.ranks import RankContext, RankPool

NUM_STEPS = 14
PRESETS = {
    "mics": ShardConfig.preset("mics"),
    "mics-prefetch-2": ShardConfig.preset("mics", prefetch=2),
    "zeropp-hpz-in-node": ShardConfig.preset("zeropp-hpz", grads="partition"),
    "paro-nii": ShardConfig.preset("paro-nii"),
    "paro-nig": ShardConfig.preset("paro-nig"),
    "paro-iig": ShardConfig.preset("paro-iig"),
    "ddp": ShardConfig.preset("ddp"),
    "zero3": ShardConfig.preset("zero3"),
    "every-micro-step": ShardConfig.preset("mics", second_hop="micro_step"),
    "no-second-hop-overlap": ShardConfig.preset("mics", overlap={"gather", "reduce", "update"}),
}

PREDICTED = ("mics", "mics-prefetch-2", "zeropp-hpz-in-node", "paro-nii", "paro-nig", "paro-iig")  # have a second hop


@dataclass(slots=True)
class LoopRun:
    """A model, sharded or plain, with two optimizers of its parameters, and the ranks whose batches it is given."""

    model: nn.Module
    ranks: Sequence[int]
    sharded: Sharded | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    num_calls: int = 0

    def losses(self) -> Iterator[Tensor]:
        self.num_calls += 1
        for rank in self.ranks:
            generator = torch.Generator().manual_seed(1000 * self.num_calls + rank)
            x = torch.randn(3, unusual.WIDTH, generator=generator, dtype=torch.float64)
            yield self.model(x).square().mean() / len(self.ranks)

    def backward(self, declared: tuple[int, int] | None = None) -> None:
        is_declared = declared is not None and self.sharded is not None
        with self.sharded.micro_step(declared[0], of=declared[1]) if is_declared else nullcontext():
            for loss in self.losses():
                loss.backward()

    def backward_twice(self) -> None:
        losses = [*self.losses()]
        for _ in range(2):
            for loss in losses:
                loss.backward(retain_graph=True)

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self, clears: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        if clears:
            self.clear()

    def clip(self) -> None:
        if self.sharded is None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        else:
            self.sharded.clip_grad_norm_(0.5)

    def clear_one(self) -> None:
        self.optimizers[self.num_calls % 2].zero_grad()

    def step_one(self) -> None:
        self.optimizers[self.num_calls % 2].step()

    def drop_one(self) -> None:
        """Drop one gradient without reading any."""
        parameters = [*self.model.parameters()]
        parameters[self.num_calls % len(parameters)].grad = None

    def scale(self) -> None:
        for grad in [p.grad for p in self.model.parameters()]:
            if grad is not None:
                grad.mul_(0.5)

    def read(self) -> None:
        assert [parameter.grad is None for parameter in self.model.parameters()]

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            for _ in self.losses():
                pass
        self.model.train()

    def fail(self) -> None:
        """A forward with gradients that raises in its third block."""

        def refuse(*_: object) -> None:
            raise ArithmeticError("on purpose")

        hook = self.model.blocks[2].register_forward_pre_hook(refuse)
        with pytest.raises(ArithmeticError):
            next(self.losses())
        hook.remove()

    def change_order(self) -> None:
        self.model.order = self.model.order[::-1]


BETWEEN = [
    *(LoopRun.evaluate, LoopRun.fail, LoopRun.read, LoopRun.clip, LoopRun.clear, LoopRun.change_order),
    *(LoopRun.clear_one, LoopRun.step_one, LoopRun.drop_one, LoopRun.scale),
]


def gradients_of(sharded: Sharded) -> list[list[GradBucket]]:
    return [*sharded._engine.reducer.grad_buckets.values()]


def play(run: LoopRun, seed: int) -> None:
    """A random loop: mostly windows of one length, with all that may come between."""
    choose = random.Random(seed)
    usual = choose.choice([1, 2, 3])
    for _ in range(NUM_STEPS):
        length = usual if choose.random() < 0.7 else choose.randint(1, 4)
        kind = choose.choice(["plain"] * 5 + ["declared", "wrong", "twice"])
        for index in range(length):
            if choose.random() < 0.15:
                choose.choice(BETWEEN)(run)
            if kind == "twice" and index == 0:
                run.backward_twice()
            elif kind == "declared":
                run.backward((index, length))
            elif kind == "wrong":
                run.backward((choose.randrange(3), 3))
            else:
                run.backward()
        ending = choose.random()
        if ending < 0.3:
            run.clip()
        elif ending < 0.4:
            run.drop_one()
        if ending > 0.9:
            run.clear()  # a step that a scaler skips
        else:
            run.step(clears=ending > 0.1)


def start(ranks: Sequence[int], config: ShardConfig | None) -> LoopRun:
    torch.manual_seed(0)
    model = unusual.Stack().double()
    sharded = None if config is None else shard(model, config, units=[unusual.Block])
    parameters = [*model.parameters()]
    optimizers = [
        torch.optim.SGD(parameters[::2], lr=0.1, momentum=0.5),
        torch.optim.Adam(parameters[1::2], lr=0.01, eps=1e-3),
    ]
    return LoopRun(model=model, ranks=ranks, sharded=sharded, optimizers=optimizers)


@cache
def play_plain(seed: int) -> list[Tensor]:
    """Parameters, the same for all presets."""
    plain = start(range(4), None)
    play(plain, seed)
    return [p.detach() for p in plain.model.parameters()]


def play_sharded(ctx: RankContext, config: ShardConfig, seeds: list[int]) -> list[tuple[list[Tensor], int, int]]:
    """Parameters, predicted backwards and second hops that others followed, of each seed."""
    results = []
    for seed in seeds:
        run = start([ctx.rank], config)
        assert run.sharded is not None
        repeated, predicted = [], []
        begin, end = AccumulationWindow.begin_backward, Reducer.end_step

        def spied_begin(window: AccumulationWindow, *, adds: bool, predicted=predicted, begin=begin) -> None:
            begin(window, adds=adds)
            predicted.append(window.is_last and window.declared is None)

        def spied_end(reducer: Reducer, repeated=repeated, end=end) -> RepeatedHops:
            found = end(reducer)
            repeated.append(len(found.hops))
            return found

        AccumulationWindow.begin_backward, Reducer.end_step = spied_begin, spied_end
        try:
            play(run, seed)
        finally:
            AccumulationWindow.begin_backward, Reducer.end_step = begin, end
        results.append(([*wholes(dict(run.model.named_parameters())).values()], sum(predicted), sum(repeated)))
    return results


@pytest.mark.wide(every=7)
@pytest.mark.parametrize("preset", PRESETS)
def test_generated_loops_train_as_a_plain_process_does(ranks: RankPool, preset: str) -> None:
    first = [*PRESETS].index(preset) % 5
    seeds = [first, first + 1, first + 2]
    expected = [play_plain(seed) for seed in seeds]
    for outcomes in ranks(4, play_sharded, PRESETS[preset], seeds, ranks_per_node=2):
        for seed, (parameters, _, _), plain_parameters in zip(seeds, outcomes, expected, strict=True):
            for found, wanted in zip(parameters, plain_parameters, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11, msg=f"seed {seed}")
        num_predicted = sum(predicted for _, predicted, _ in outcomes)
        assert num_predicted > 10 if preset in PREDICTED else num_predicted == 0
        assert sum(repeated for _, _, repeated in outcomes) > 3  # also where nothing is predicted: wrong declarations


def reuse_units(run: LoopRun, order: list[int], declared: bool) -> list[Tensor]:
    """Parameters after steps of one backward, whose units may be used, recomputed and reduced twice."""
    run.model.order = order
    for _ in range(4):
        run.backward((0, 1) if declared else None)
        run.step()
    return [*wholes(dict(run.model.named_parameters())).values()]


def reuse_units_sharded(ctx: RankContext, config: ShardConfig, order: list[int], declared: bool) -> list[Tensor]:
    run = start([ctx.rank], config)
    assert run.sharded is not None
    run.model.checkpointed = dict.fromkeys(range(4), True)
    parameters = reuse_units(run, order, declared)
    rows = run.sharded.traffic()
    assert [(row.count, row.sent_bytes) for row in rows] == [(row.planned_count, row.planned_bytes) for row in rows]
    return parameters


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0], [1, 0, 2, 3, 2, 0], [0, 1, 0]], ids=str)
@pytest.mark.parametrize("preset", ["mics", "paro-iig"])
def test_a_unit_that_is_recomputed_twice_is_reduced_whole(
    ranks: RankPool, preset: str, order: list[int], declared: bool
) -> None:
    expected = reuse_units(start(range(4), None), order, declared)
    for found in ranks(4, reuse_units_sharded, PRESETS[preset], order, declared, ranks_per_node=2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def sums_of_bf16(ctx: RankContext, lengths: list[int], is_predicted: bool) -> list[Tensor]:
    """Gradients of the last of some steps, of a bf16 model whose sums are in fp32; scaled up, where 16 bits round."""
    torch.manual_seed(0)
    model = unusual.Stack().bfloat16()
    overlap = {"gather", "reduce", "second_hop"} if is_predicted else {"gather", "reduce"}
    config = ShardConfig.preset("mics", param_dtype="bfloat16", reduce_dtype="float32", overlap=overlap)
    sharded = shard(model, config, units=[unusual.Block])
    for step, length in enumerate(lengths):
        for micro in range(length):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + ctx.rank)
            model(torch.randn(3, unusual.WIDTH, generator=generator).bfloat16()).float().square().mean().backward()
        sharded.internals.engine.finish_gradients()
        held = [gradient.result.clone() for of_unit in gradients_of(sharded) for gradient in of_unit]
        model.zero_grad()
        torch.optim.SGD(model.parameters(), lr=0.0).step()  # ends the window
    return held


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("last", [2, 3, 4])
def test_a_wrong_prediction_rounds_no_sum_to_16_bits(ranks: RankPool, last: int) -> None:
    lengths = [2, 2, last]
    predicted, exact = (
        ranks(4, sums_of_bf16, lengths, is_predicted, ranks_per_node=2) for is_predicted in (True, False)
    )
    torch.testing.assert_close(predicted, exact, rtol=1e-4, atol=1e-6)


def events_without_signal(ctx: RankContext, lengths: list[int], preset: str) -> tuple[list[str], list[str]]:
    """Names of the units in order, and the events of the last step, whose loop declares nothing."""
    torch.manual_seed(0)
    case = models.transformer()
    model = case.build()
    sharded = shard(model, ShardConfig.preset(preset, topology=Topology(ranks_per_node=2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layers = tuple({type(unit.module) for unit in sharded.internals.units[1:]})

    def step(index: int) -> None:
        for micro in range(lengths[index]):
            case.loss(model, case.batch(index, micro, ctx.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for index in range(len(lengths) - 1):
        step(index)
    with recorded(model, layers) as events:
        step(len(lengths) - 1)
    return [unit.name for unit in sharded.internals.units[1:]], list(events)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("lengths", [[2, 2, 2], [3, 1, 1, 1], [2, 3, 3, 3]], ids=str)
@pytest.mark.parametrize(("preset", "kind"), [("mics", "all_reduce"), ("paro-iig", "reduce_scatter")])
def test_the_second_hop_of_a_loop_without_signal_starts_in_its_last_backward(
    ranks: RankPool, preset: str, kind: str, lengths: list[int]
) -> None:
    units, events = ranks(4, events_without_signal, lengths, preset, ranks_per_node=2)[0]
    last_backward = len(events) - 1 - events[::-1].index(f"backward {units[0]}")
    hops = [n for n, event in enumerate(events) if event == f"start {kind} {units[-1]}"]
    assert len(hops) == (1 if kind == "all_reduce" else 1 + lengths[-1])
    assert hops[-1] < last_backward


@pytest.mark.parametrize("lengths", [[2, 2], [2, 3, 2]], ids=str)
def test_a_loop_that_has_not_repeated_is_not_predicted(ranks: RankPool, lengths: list[int]) -> None:
    units, events = ranks(4, events_without_signal, lengths, "mics", ranks_per_node=2)[0]
    last_backward = len(events) - 1 - events[::-1].index(f"backward {units[0]}")
    assert events.index(f"start all_reduce {units[-1]}") > last_backward


def early_hops_beside_an_unused_unit(ctx: RankContext, preset: str) -> list[int]:
    """Second hops that had started before each step, in a loop that declares nothing and never uses the third block."""
    run = start([ctx.rank], PRESETS[preset])
    assert run.sharded is not None
    run.model.order = [0, 1, 3]
    early = []
    for _ in range(4):
        run.backward()
        early.append(len(run.sharded._engine.reducer.second_hops._early))
        run.step()
    return early


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", PREDICTED)
def test_a_unit_that_no_rank_uses_holds_up_no_other(ranks: RankPool, preset: str) -> None:
    for early in ranks(4, early_hops_beside_an_unused_unit, preset, ranks_per_node=2):
        every = 5 if preset.startswith("paro-n") else 4  # where parameters are whole, every unit is reduced
        assert early == [0, 0, every, every]


def told_and_untold(ctx: RankContext, config: ShardConfig) -> list[list[list[float]]]:
    outcomes = []
    for is_told in (True, False):
        run = start([ctx.rank], config)
        for _ in range(5):
            for micro in range(3):
                run.backward((micro, 3) if is_told else None)
            run.step()
        outcomes.append([each.tolist() for each in wholes(dict(run.model.named_parameters())).values()])
    return outcomes


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", ["mics", "paro-nig", "paro-iig"])
def test_a_right_prediction_gives_the_bits_of_the_declaration(ranks: RankPool, preset: str) -> None:
    for told, untold in ranks(4, told_and_untold, PRESETS[preset], ranks_per_node=2):
        assert untold == told


def drop_some(run: LoopRun, is_declared: bool) -> list[Tensor]:
    """Parameters after steps of one backward, after which some gradients are dropped before any is read."""
    for _ in range(4):
        run.backward((0, 1) if is_declared else None)
        for parameter in [*run.model.parameters()][::3]:
            parameter.grad = None
        run.step()
    return [*wholes(dict(run.model.named_parameters())).values()]


def drop_some_sharded(ctx: RankContext, config: ShardConfig) -> list[list[Tensor]]:
    dropped = []
    for is_declared in (True, False):
        dropped.append(drop_some(start([ctx.rank], config), is_declared))
    return dropped


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", ["mics", "paro-iig", "ddp"])
def test_a_dropped_gradient_leaves_the_others_of_its_unit(ranks: RankPool, preset: str) -> None:
    expected = drop_some(start(range(4), None), False)
    for declared, predicted in ranks(4, drop_some_sharded, PRESETS[preset], ranks_per_node=2):
        torch.testing.assert_close(declared, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(predicted, expected, rtol=1e-9, atol=1e-11)


def traffic_by_step(ctx: RankContext, config: ShardConfig, lengths: list[int]) -> list[tuple[bool, list[str]]]:
    """Whether each step sent what its plan says, and the phases of that plan."""
    run = start([ctx.rank], config)
    assert run.sharded is not None
    found = []
    for length in lengths:
        for _ in range(length):
            run.backward()
        run.step()
        rows = run.sharded.traffic()
        is_equal = all((row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes) for row in rows)
        found.append((is_equal, [planned.phase for planned in run.sharded.plan.collectives]))
    return found


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", ["mics", "paro-nig", "paro-iig", "zeropp-hpz-in-node", "no-second-hop-overlap"])
def test_the_plan_names_the_second_hops_of_a_wrong_prediction(ranks: RankPool, preset: str) -> None:
    lengths = [2, 2, 2, 4, 2, 2, 1, 3]
    early = [3] if preset != "no-second-hop-overlap" else []  # predicted at 2, of 4; two steps of 2, and then 1
    for steps in ranks(4, traffic_by_step, PRESETS[preset], lengths, ranks_per_node=2):
        assert all(is_equal for is_equal, _ in steps[1:])
        assert [n for n, (_, phases) in enumerate(steps) if "early_second_hop" in phases] == early


def traffic_where_gradients_are_dropped(ctx: RankContext, config: ShardConfig, reads: bool) -> list[bool]:
    """Whether each step sent what its plan says; its window is begun again, or read, after its last backward."""
    run = start([ctx.rank], config)
    assert run.sharded is not None
    found = []
    for step in range(6):
        for attempt in range(1 + step % 2):
            if attempt and reads:
                run.read()
            elif attempt:
                for parameter in run.model.parameters():
                    parameter.grad = None
            run.backward()
            run.backward()
        run.step()
        rows = run.sharded.traffic()
        found.append(all((row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes) for row in rows))
    return found


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("preset", ["mics", "paro-iig", "ddp", "no-second-hop-overlap"])
def test_the_plan_names_the_second_hops_of_windows_that_are_read_or_begun_again(
    ranks: RankPool, preset: str, reads: bool
) -> None:
    for found in ranks(4, traffic_where_gradients_are_dropped, PRESETS[preset], reads, ranks_per_node=2):
        assert all(found[1:])


def lasts(
    lengths: list[int], declared: bool | None = None, predicts: bool = True, unequal: tuple[int, ...] = ()
) -> list[list[bool]]:
    window = AccumulationWindow(predicts=predicts)
    window.declared = declared
    found = []
    for length in lengths:
        found.append([])
        for index in range(length):
            window.begin_backward(adds=index > 0)
            found[-1].append(window.is_last)
        window.end_step(is_equal_on_all_ranks=length not in unequal)
    return found


def test_two_equal_steps_predict_the_third() -> None:
    yes, no = True, False
    assert lasts([2, 2, 2, 3, 2, 2, 1]) == [[no, no], [no, no], [no, yes], [no, yes, no], [no, no], [no, no], [no]]
    assert lasts([1, 1, 1], declared=False) == [[no]] * 3
    assert lasts([1, 1, 1], declared=True) == [[yes]] * 3
    assert lasts([1, 1, 1], predicts=False) == [[no]] * 3
    assert lasts([1, 1, 1, 2, 2, 2], unequal=(1,)) == [[no]] * 3 + [[no, no]] * 2 + [[no, yes]]


def test_a_window_that_was_cleared_or_another_optimizer_is_no_step() -> None:
    window = AccumulationWindow(predicts=True)
    for _ in range(3):
        window.begin_backward(adds=False)
        window.begin_backward(adds=False)  # gradients were cleared
        window.begin_backward(adds=True)
        assert (window.num_backwards, window.number) == (3, 2)
        window.end_step(is_equal_on_all_ranks=True)
        window.end_step(is_equal_on_all_ranks=True)  # a second optimizer
    window.begin_backward(adds=False)
    assert not window.is_last
    window.begin_backward(adds=True)
    assert window.is_last
    assert (window.num_backwards, window.number) == (2, 2)


def test_a_window_returns_what_was_reduced_again() -> None:
    window = AccumulationWindow(predicts=False)
    for adds in (False, True):
        window.begin_backward(adds=adds)
        assert [window.record_first_hop(unit) for unit in (2, 1)] == [False, False]
        window.record_second_hop(2, 0)
        assert window.take_reduced() == [1, 2]
    assert window.record_first_hop(1)
    assert window.take_reduced() == [1]
    repeated = window.end_step(is_equal_on_all_ranks=True)
    assert repeated.first_hops == ((1, 1),)
    assert repeated.hops == (RepeatedHop(micro_step=0, unit=2, bucket=0),)
    assert repeated.usage_reductions == (0, 1)
    assert window.end_step(is_equal_on_all_ranks=True) == NONE_REPEATED
