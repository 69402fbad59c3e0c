"""Can a plan be handed to a Trainer and to an Accelerator, and is it refused in another job?"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.planner.choice import Choice, plan
from mics_strategy.planner.model_trace import TraceInput, trace_model
from mics_strategy.planner.workload import Workload
from mics_strategy.scopes import resolve_scopes
from mics_strategy.topology import Topology
from tests.accelerate import runs as accelerate_runs
from tests.lightning.modules import WIDTH, Layer, Net, Regression
from tests.lightning.runs import assert_same, fitted, run
from tests.planner.jobs import tiny_cluster
from tests.ranks import RankContext, RankPool

BATCH = 8  # samples of a step


def planned(world_size: int) -> Choice:
    """The plan of `Net` in a job on one node.

    Optimizer states are so large that only their shards fit.
    """
    with torch.device("meta"):
        net = Net()
    traced = TraceInput(
        name="net", example={"x": torch.zeros(1, WIDTH)}, units=[Layer], loss=lambda out: out.float().square().mean()
    )
    training = Workload(
        model=trace_model(net, traced),
        global_batch=BATCH,
        recompute=False,
        param_dtype="float32",
        micro_batch=2,
        optimizer_state_bytes=10**7,
    )
    cluster = tiny_cluster(nodes=1, ranks_per_node=world_size)
    roomy = plan(training, cluster)
    smallest = min(point.memory.total_bytes for point in roomy.solution.fitting)
    device = dataclasses.replace(cluster.device, memory_bytes=smallest)
    return plan(training, dataclasses.replace(cluster, device=device))


def batches(ctx: RankContext, choice: Choice) -> DataLoader[Any]:
    """The samples of this rank, in micro-batches of the plan."""
    inputs = torch.randn(2 * BATCH, WIDTH, generator=torch.Generator().manual_seed(3 + ctx.rank))
    return DataLoader(TensorDataset(inputs, inputs[:, :2].tanh()), batch_size=choice.micro_batch)


def train(ctx: RankContext) -> None:
    choice = planned(ctx.world_size)
    assert choice.config.optimizer == ctx.world_size
    options = {"accumulate_grad_batches": choice.num_micro_steps}
    expected = fitted(ctx, "ddp", Regression("adamw"), batches(ctx, choice), **options)
    assert_same(fitted(ctx, choice.strategy(), Regression("adamw"), batches(ctx, choice), **options), expected)


def test_a_trainer_trains_with_a_plan_what_ddp_trains(ranks: RankPool) -> None:
    run(ranks, 2, train)


def refuse_at_another_size(ctx: RankContext) -> None:
    choice = planned(2 * ctx.world_size)
    with pytest.raises(ConfigError, match=r"planned for `world_size=4` ranks, and the job has 2\. Plan again"):
        fitted(ctx, choice.strategy(), Regression("sgd"), batches(ctx, choice))


def test_a_trainer_of_another_size_refuses_the_plan(ranks: RankPool) -> None:
    run(ranks, 2, refuse_at_another_size)


def accelerate(ctx: RankContext, given: str) -> dict[str, Tensor]:
    from accelerate import Accelerator

    choice = planned(ctx.world_size)
    steps = choice.num_micro_steps
    if given == accelerate_runs.PLAIN:
        accelerator = accelerate_runs.accelerator(given, accelerator_gradient_accumulation_steps=steps)
    else:
        accelerator = Accelerator(fsdp_plugin=choice.plugin(), gradient_accumulation_steps=steps)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for inputs, targets in batches(ctx, choice):
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return accelerate_runs.values(model)


def test_an_accelerator_trains_with_a_plan_what_ddp_trains(ranks: RankPool) -> None:
    expected, *_ = accelerate_runs.run(ranks, 2, accelerate, accelerate_runs.PLAIN)
    found, *_ = accelerate_runs.run(ranks, 2, accelerate, "plan")
    assert_same(found, expected)


def test_a_configuration_of_another_job_is_refused_until_it_is_freed() -> None:
    config, topology = planned(4).config, Topology(ranks_per_node=4)
    assert resolve_scopes(config, topology, 4).optimizer == 4
    with pytest.raises(ConfigError, match="planned for `world_size=4` ranks, and the job has 8"):
        resolve_scopes(config, topology, 8)
    assert resolve_scopes(config.replace(world_size="any"), topology, 8).optimizer == 4


@pytest.mark.parametrize("size", [0, -1, True, "all", 2.0])
def test_a_number_of_ranks_is_one(size: Any) -> None:
    with pytest.raises(ConfigError, match="`world_size="):
        ShardConfig(world_size=size)
