"""Does the planner send what the engine sends, for real models?"""

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.estimate import estimate_memory
from mics_strategy.planner.choice import simulate
from mics_strategy.planner.comm_time import CommTime
from mics_strategy.planner.measured import MeasuredCompute, MeasuredUnit
from mics_strategy.planner.model import ModelDescription
from mics_strategy.planner.model_formulas import describe
from mics_strategy.planner.simulator import unit_times
from mics_strategy.planner.step_tasks import StepRules, step_tasks
from mics_strategy.planner.workload import Workload
from tests.planner.jobs import tiny_cluster
from tests.planner.test_model import TOKENS, build, shape

NODES, PER_NODE = 2, 4
SHAPES = {
    "llama": shape("llama", num_layers=3),
    "gpt2": shape("gpt2", num_layers=3),
    "bert": shape("bert", num_layers=3),
    "large embedding": shape("llama", vocab_size=33000, hidden_size=256),  # units, and large parameters in chunks
}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in ShardConfig.PRESETS},
    "int8": {"preset": "zero3", "weight_codec": "int8", "grad_codec": "int4"},
    "int8 on all links": {"preset": "mics", "weight_codec": "int8", "grad_codec": "int8", "codec_links": "all"},
    "secondary of 2": {"preset": "zero3", "partition_size": 2, "secondary_params": "partition"},
    "flat": {"preset": "zero3", "hierarchical": False},
    "16-bit gradients": {"preset": "paro-igg", "reduce_dtype": "bfloat16"},
    "prefetch 2": {"preset": "mics", "prefetch": 2},
    "every micro-step": {"preset": "mics", "partition_size": 2},
}

pytestmark = pytest.mark.wide(every=3)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("model", SHAPES)
def test_planned_bytes_are_those_of_the_engine(model: str, name: str) -> None:
    """Axis by axis, collective by collective, in the engine that is built on the meta device."""
    fields = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, **CONFIGS[name]}
    config = ShardConfig.preset(fields.pop("preset"), coalesce=False, **fields)
    module: nn.Module = build(SHAPES[model], torch.float32)
    engine = estimate_memory(module, config, num_nodes=NODES, ranks_per_node=PER_NODE)
    training = Workload(
        model=describe(SHAPES[model], TOKENS),
        global_batch=3 * NODES * PER_NODE,
        micro_batch=1,
        recompute=False,
    )
    step = simulate(training, tiny_cluster(nodes=NODES, ranks_per_node=PER_NODE), config)
    planned, real = step.job.plan(3).collectives, engine.plan(3).collectives
    assert Counter(planned) == Counter(real)
    sent = Counter[str]()
    for collective in real:
        sent[collective.axis] += collective.sent_bytes
    assert step.sent_bytes == dict(sent)
    measured_too = dataclasses.replace(training, measured=measured(training.model))
    for workload, backend in itertools.product((training, measured_too), ("nccl", "gloo")):
        cluster = dataclasses.replace(tiny_cluster(nodes=NODES, ranks_per_node=PER_NODE), backend=backend)
        simulated = simulate(workload, cluster, config)
        rows = simulated.timeline().rows_of(0)[1:]
        on_rows = sum(interval.sent_bytes for row in rows for interval in row.intervals)
        assert on_rows == sum(simulated.sent_bytes.values())


def measured(model: ModelDescription) -> MeasuredCompute:
    """A second for every forward, and for every backward."""
    units = tuple(MeasuredUnit(name=unit.name, forward_s=1.0, backward_s=1.0) for unit in model.units)
    return MeasuredCompute(micro_batch=1, units=units, optimizer_s_per_numel=0.0)


def test_a_plan_of_other_units_than_the_times_is_refused() -> None:
    training = Workload(model=describe(SHAPES["llama"], TOKENS), global_batch=8, micro_batch=1, recompute=False)
    job = simulate(training, tiny_cluster(nodes=NODES, ranks_per_node=PER_NODE), ShardConfig.preset("mics")).job
    times = tuple(dataclasses.replace(time, name=time.name.strip("()")) for time in unit_times(job))
    rules = StepRules.of(job.config, frozenset(), CommTime(job.cluster, job.scopes.axes))
    with pytest.raises(ConfigError, match=r"Collectives of '\(root\)' are planned"):
        step_tasks(job.plan(1), job.order(1), times, 0.0, rules)
