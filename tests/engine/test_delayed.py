"""Does `second_hop="delayed"` compute what plain torch computes in one process, and hide its hops?"""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, Sharded, Topology, finish_delayed, shard
from mics_strategy.engine.bucket_specs import DELAYED_STATE
from mics_strategy.engine.optimizer.delayed import delayed_of
from mics_strategy.estimate import estimate_memory
from tests.engine.delayed_plain import Loop, train_plain
from tests.engine.training import wholes
from tests.outer.plain import Net, batch, loss_of
from tests.ranks import RankContext, RankPool, simulate

FIELDS: dict[str, dict[str, Any]] = {
    "mics": {"name": "mics"},
    "zero1": {"name": "zero1"},
    "zero2 in a node": {"name": "paro-nig"},
    "paro-nni": {"name": "paro-nni"},
    "ddp": {"name": "ddp"},
    "hpz": {"name": "mics", "secondary_params": 1},
}
IN_NODE_FIRST = {"mics", "zero2 in a node", "hpz"}  # whose gradients are sharded inside the node
UNUSUAL = {
    "windows": Loop(accumulation=(1, 3, 2, 2, 1)),
    "skipped": Loop(skipped=(0, 3, 4, 9, 12), optimizer="sgd"),
    "dropped": Loop(dropped=(0, 2, 5, 6, 11)),
    "layers": Loop(leaves_out=(0, 3, 4, 8, 9, 15)),
    "finished": Loop(steps=7, finishes=True, decay=0.9),
    "finished between": Loop(steps=8, finishes=True),
}
Trained = tuple[nn.Module, Sharded, torch.optim.Optimizer, Any]


def config_of(name: str, **fields: Any) -> ShardConfig:
    fields = {"second_hop": "delayed", "topology": Topology(ranks_per_node=2), **FIELDS[name], **fields}
    return ShardConfig.preset(**fields)


def start(config: ShardConfig, loop: Loop) -> Trained:
    model = Net()
    sharded = shard(model, config, units=[nn.Linear])
    optimizer = loop.optimizer_of(model)
    return model, sharded, optimizer, loop.schedule_of(optimizer)


def run_step(ctx: RankContext, loop: Loop, trained: Trained, step: int) -> None:
    model, sharded, optimizer, schedule = trained
    model.left_out = loop.layer_left_out(step, ctx.rank)
    for micro in range(loop.micro_steps(step)):
        loss_of(model, batch(step, micro, ctx.rank), loop.micro_steps(step)).backward()
    if step in loop.dropped:
        optimizer.zero_grad()
        return
    if loop.clip is not None:
        sharded.clip_grad_norm_(loop.clip)
    if step in loop.skipped:
        sharded.clip_grad_norm_(1.0)
    else:
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()


def train(ctx: RankContext, config: ShardConfig, loop: Loop) -> list[tuple[dict[str, Tensor], list[Any]]]:
    """Parameters after each step, and its traffic."""
    trained, found = start(config, loop), []
    model, sharded, optimizer, _ = trained
    for step in range(loop.steps):
        run_step(ctx, loop, trained, step)
        found.append((wholes(dict(model.named_parameters())), [*sharded.traffic()]))
    if loop.finishes:
        assert finish_delayed(sharded)
        if loop.clip is not None:
            sharded.clip_grad_norm_(loop.clip)
        optimizer.step()
        optimizer.zero_grad()
        assert not finish_delayed(sharded)
        found.append((wholes(dict(model.named_parameters())), []))
    return found


def check(found: list[Any], loop: Loop, name: str, atol: float = 0.0) -> None:
    expected = train_plain(loop, adds_in_node_first=name in IN_NODE_FIRST)
    for of_rank in found:
        assert len(of_rank) == len(expected)
        for step, ((values, _), plain) in enumerate(zip(of_rank, expected, strict=True)):
            for key, value in plain.items():
                torch.testing.assert_close(values[key], value, rtol=0, atol=atol, msg=f"{key} after step {step}")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", FIELDS)
def test_twenty_steps_are_those_of_plain_torch_bit_by_bit(ranks: RankPool, name: str, optimizer: str) -> None:
    loop = Loop(optimizer=optimizer, accumulation=(2,), decay=0.95)
    check(ranks(4, train, config_of(name), loop), loop, name)


@pytest.mark.parametrize("name", ["mics", "zero1"])
@pytest.mark.parametrize("unusual", UNUSUAL)
def test_unusual_windows_are_those_of_plain_torch_bit_by_bit(ranks: RankPool, name: str, unusual: str) -> None:
    check(ranks(4, train, config_of(name), UNUSUAL[unusual]), UNUSUAL[unusual], name)


def test_ranks_with_whole_parameters_may_run_other_layers(ranks: RankPool) -> None:
    loop = Loop(leaves_out=(0, 1, 4, 5, 6, 9, 14), by_rank=True)
    check(ranks(4, train, config_of("ddp"), loop), loop, "ddp")


def train_and_evaluate(ctx: RankContext, config: ShardConfig, loop: Loop) -> list[Any]:
    """As `train`, with an evaluation behind each step."""
    trained, found = start(config, loop), []
    for step in range(loop.steps):
        run_step(ctx, loop, trained, step)
        model = trained[0].eval()
        model.left_out = -1
        with torch.no_grad():
            model(batch(99, 0, 0))
        found.append((wholes(dict(model.train().named_parameters())), []))
    return found


@pytest.mark.parametrize("name", ["zero1", "paro-nni"])
def test_ranks_run_other_layers_behind_an_evaluation(ranks: RankPool, name: str) -> None:
    """The parameters have changed since, so that all ranks gather all units in one order again."""
    loop = Loop(steps=8, leaves_out=(0, 1, 3, 4, 7), by_rank=True)
    check(ranks(4, train_and_evaluate, config_of(name), loop, timeout_s=60.0), loop, name)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("name", FIELDS)
def test_clipping_is_that_of_plain_torch(ranks: RankPool, name: str) -> None:
    loop = Loop(clip=0.1, finishes=True)
    check(ranks(4, train, config_of(name), loop), loop, name, atol=1e-12)


def test_whole_tensors_step_on_their_owners(ranks: RankPool) -> None:
    """Muon's own arithmetic is in bfloat16."""
    loop = Loop(steps=8, optimizer="muon")
    check(ranks(4, train, config_of("mics", optimizer_layout="tensors"), loop), loop, "mics", atol=1e-3)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("name", FIELDS)
def test_sent_bytes_are_planned(ranks: RankPool, name: str) -> None:
    for of_rank in ranks(4, train, config_of(name), Loop(steps=5, accumulation=(2,))):
        for _, rows in of_rank[1:]:
            assert all((row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes) for row in rows)
            assert any(row.axis == "inter_node" for row in rows)


def train_scaled(ctx: RankContext, config: ShardConfig, loop: Loop, overflows: tuple[int, ...]) -> list[Any]:
    """With a gradient scaler that grows often; the last rank overflows in some steps."""
    model, sharded, optimizer, _ = start(config, loop)
    scaler, found = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3), []
    for step in range(loop.steps):
        loss = loss_of(model, batch(step, 0, ctx.rank), 1)
        is_inf = step in overflows and ctx.rank == ctx.world_size - 1
        scaler.scale(loss * float("inf") if is_inf else loss).backward()
        if loop.clip is not None:
            scaler.unscale_(optimizer)
            sharded.clip_grad_norm_(loop.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((wholes(dict(model.named_parameters())), []))
    if loop.finishes:
        assert finish_delayed(sharded)
        if loop.clip is not None:
            sharded.clip_grad_norm_(loop.clip)
        optimizer.step()
        found.append((wholes(dict(model.named_parameters())), []))
    return found


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", ["mics", "zero1"])
def test_a_scaler_unscales_windows_by_their_own_scales(ranks: RankPool, name: str, clip: float | None) -> None:
    """Scales are powers of two, so that parameters are those without a scaler. An overflow is seen a step later."""
    loop = Loop(skipped=(0, 6, 9), finishes=True, clip=clip)
    found = ranks(4, train_scaled, config_of(name), loop, (0, 5, 8))
    check(found, loop, name, atol=0.0 if clip is None else 1e-12)


def evaluate(ctx: RankContext, config: ShardConfig, loop: Loop) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Outputs of evaluations between steps and between micro-steps."""
    trained, found = start(config, loop), []
    model, _, optimizer, _ = trained
    inputs = batch(99, 0, 0)
    for step in range(loop.steps):
        for micro in range(2):
            loss_of(model, batch(step, micro, ctx.rank), 2).backward()
            if step % 3:
                model.eval()
                with torch.no_grad():
                    found.append((wholes(dict(model.named_parameters())), model(inputs)))
                model.train()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append((wholes(dict(model.named_parameters())), model(inputs)))
        model.train()
    return found


@pytest.mark.parametrize("name", ["mics", "zero1", "ddp"])
def test_evaluations_see_committed_parameters_and_change_nothing(ranks: RankPool, name: str) -> None:
    loop, inputs = Loop(steps=8, accumulation=(2,)), batch(99, 0, 0)
    by_step = [Net().eval(), *(Net().eval() for _ in range(loop.steps))]
    for model, values in zip(by_step[1:], train_plain(loop, adds_in_node_first=name in IN_NODE_FIRST), strict=True):
        model.load_state_dict(values)
    expected = []
    for step in range(loop.steps):
        expected += [*([by_step[step]] * (2 if step % 3 else 0)), by_step[step + 1]]
    for found in ranks(4, evaluate, config_of(name), loop):
        for (_, output), model in zip(found, expected, strict=True):
            assert torch.equal(output, model(inputs))


def memory_of(ctx: RankContext, name: str, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    config = config_of(name, reduce_dtype="bfloat16")
    with torch.device("meta"):
        model = Net().to(dtype)
    estimate = estimate_memory(model, config, num_nodes=2, ranks_per_node=2, units=[nn.Linear])
    return dict(shard(Net().to(dtype), config, units=[nn.Linear]).memory.bytes_by_purpose), dict(
        estimate.bytes_by_purpose
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FIELDS)
def test_memory_is_that_of_the_estimate(ranks: RankPool, name: str, dtype: torch.dtype) -> None:
    for allocated, estimated in ranks(4, memory_of, name, dtype):
        purposes = (*DELAYED_STATE, "second-hop staging buffers")
        assert {k: v for k, v in allocated.items() if k in purposes and v} == {
            k: v for k, v in estimated.items() if k in purposes and v
        }
        assert ("delayed means" in allocated) == (name not in {"mics", "hpz", "ddp"})


def quantized(ctx: RankContext, codec: str, second_hop: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    shard(model, config_of("mics", grad_codec=codec, second_hop=second_hop), units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1 if second_hop == "boundary" else 2):  # the first two steps have the gradient of one window
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(ctx.rank))
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return wholes(dict(model.named_parameters()))


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_first_commit_is_a_synchronous_step_also_with_codecs(ranks: RankPool, codec: str) -> None:
    delayed, synchronous = (ranks(4, quantized, codec, second_hop) for second_hop in ("delayed", "boundary"))
    for values, expected in zip(delayed, synchronous, strict=True):
        assert all(torch.equal(values[name], value) for name, value in expected.items())


def in_flight(ctx: RankContext, name: str) -> list[int]:
    """Second hops in flight in front of each backward."""
    loop = Loop(steps=4)
    trained = start(config_of(name, reduce_dtype="bfloat16"), loop)
    hops, found = delayed_of(trained[1]).hops, []
    for step in range(loop.steps):
        found.append(len(hops._in_flight))
        run_step(ctx, loop, trained, step)
    return found


@pytest.mark.parametrize("name", ["mics", "zero1", "ddp"])
def test_all_hops_are_in_flight_while_the_next_window_computes(ranks: RankPool, name: str) -> None:
    """The hops of the first window are waited for in its step."""
    assert ranks(4, in_flight, name) == [[0, 0, 6, 6]] * 4


def report_of(ctx: RankContext, second_hop: str) -> str:
    return str(start(config_of("mics", second_hop=second_hop), Loop())[1].report())


def test_the_summary_at_start_names_the_algorithm(ranks: RankPool) -> None:
    assert "of two calls of `step` the second updates, with the gradients of both" in ranks(4, report_of, "delayed")[0]
    assert "calls of" not in ranks(4, report_of, "boundary")[0]


@pytest.mark.parametrize("name", ["mics", "zero1", "ddp"])
def test_a_stream_computes_what_threads_do(name: str) -> None:
    loop = Loop(accumulation=(1, 2), skipped=(7,), finishes=True)
    check(simulate(4, train, config_of(name), loop, ranks_per_node=2), loop, name, atol=1e-12)


def is_freed(ctx: RankContext) -> bool:
    loop = Loop(steps=3)
    trained = start(config_of("mics"), loop)
    for step in range(loop.steps):
        run_step(ctx, loop, trained, step)
    reference = weakref.ref(trained[1])
    trained[1].internals.engine.reducer.wait()  # the threads hold what is in flight
    del trained
    gc.collect()
    return reference() is None


def test_a_model_is_freed_with_its_last_reference(ranks: RankPool) -> None:
    assert ranks(4, is_freed) == [True] * 4
