"""Does a planned timeline name its work as a recorded one does, so that both can be compared?"""

from collections import Counter

import pytest
import torch

from mics_strategy import ShardConfig
from mics_strategy.planner.choice import simulate
from mics_strategy.planner.cluster import Cluster, Device, Link
from mics_strategy.planner.model_trace import TraceInput, trace_model
from mics_strategy.planner.workload import Workload
from mics_strategy.timeline import Category, PartKey, Timeline, compare
from tests import models
from tests.engine.test_profile import NODES, Training
from tests.ranks import RankContext, RankPool

PRESETS = ["mics", "zero3", "paro-iig", "paro-nig"]
LINK = Link(bytes_per_s=1e9, latency_s=1e-5, source="test")
CLUSTER = Cluster(
    name="test",
    device=Device(
        name="cpu", memory_bytes=10**10, memory_bytes_per_s=1e10, peak_flop_per_s=1e11, matmul_efficiency=0.5
    ),
    ranks_per_node=2,
    num_nodes=2,
    intra_node=LINK,
    inter_node=LINK,
    backend="gloo",
)


def record(ctx: RankContext, preset: str) -> Timeline:
    training = Training(ctx.rank, preset=preset)
    for _ in range(3):  # the last backward is predicted from the third step on
        training.step(micro_steps=2)
    profile = training.sharded.profile(steps=1)
    training.step(micro_steps=2)
    return profile.result.timeline


def planned(preset: str) -> Timeline:
    case = models.transformer()
    with torch.device("meta"):
        model = case.build()
    example = {"tokens": case.batch(0, 0, 0)["x"][:1]}
    description = trace_model(model, TraceInput(name="small", example=example, units=case.units))
    workload = Workload(model=description, global_batch=8, micro_batch=1, recompute=False, param_dtype="float32")
    config = ShardConfig.preset(preset, topology=NODES, hierarchical=True)
    return simulate(workload, CLUSTER, config).timeline()


def collectives(timeline: Timeline) -> Counter[tuple[PartKey, int]]:
    """How often each collective ran on rank 0, and the bytes that it sent.

    Buffers are broadcast outside of the plan of a step.
    """
    intervals = [interval for row in timeline.rows_of(0)[1:] for interval in row.intervals]
    return Counter((i.key, i.sent_bytes) for i in intervals if i.key.unit != "buffers")


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", PRESETS)
def test_planned_collectives_are_the_recorded_ones(ranks: RankPool, preset: str) -> None:
    recorded, plan = ranks(4, record, preset, ranks_per_node=2)[0], planned(preset)
    assert collectives(plan) == collectives(recorded)
    keys = {row.key for row in compare(plan, recorded, 0) if row.planned_s and row.recorded_s}
    computed = {key for key in keys if key.category is Category.COMPUTE}
    assert {key.name for key in computed} >= {"forward", "backward"}
    assert {key.category for key in keys} >= {Category.COMPUTE, Category.COLLECTIVE, Category.OPTIMIZER}
