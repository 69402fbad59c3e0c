"""Do the collectives of all ranks wait for one another in a circle, on a GPU, where launches do not block?

On gloo the two hops of gradients have threads of their own; on a GPU they have streams, of which each waits.
"""

from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mics_strategy import shard
from tests.cuda_harness.launch_order import find_circle, find_mismatch, find_stall, most_at_once
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import PRESETS, Training, config_of, start
from tests.cuda_harness.simulated_ranks import simulate_gpus
from tests.engine.recomputed import BUILDS, WIDTH, Nest, Shift
from tests.models import Residual
from tests.rank_report import RankContext

RANKS, PER_NODE = 4, 2
MOST_AT_ONCE = 3  # collectives of ours on one device: docs/design/cuda-harness.md says what that asks of it
# Layers that a rank's loss does not see, by step and rank: none, of two ranks in two nodes, all of one rank, others.
STEPS: tuple[dict[int, tuple[int, ...]], ...] = (
    {},
    {0: (1, 2), 3: (1, 2)},
    {0: (0, 1, 2, 3)},
    {1: (3,), 2: (0, 2)},
)
OPTIONS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no_overlap": {"overlap": "none"},
    "one_stage": {"hierarchical": False},
    "codecs": {"weight_codec": "int8", "grad_codec": "int4", "codec_links": "all", "grad_codec_hops": "all"},
    "int8": {"grad_codec": "int8"},
    "prefetch": {"prefetch": 2},
    "bf16": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "micro_step": {"second_hop": "micro_step"},
    "coalesced": {"coalesce": True},
    "two_nodes": {"partition_size": RANKS},
}


def _job(ctx: RankContext, machine: Machine, preset: str, options: dict[str, Any]) -> None:
    training = start(machine, config_of(preset, ranks_per_node=PER_NODE, **options), rank=ctx.rank)
    # With whole parameters, layers need not even run.
    option = "left_out" if training.sharded.scopes.params == 1 else "unused"
    training.micro_steps = 1
    for by_rank in STEPS:
        training.options = {option: by_rank.get(ctx.rank, ())}
        training.step()


def launch(preset: str, **options: Any) -> list[Machine]:
    """Train on simulated ranks that differ in what they use."""
    return simulate_gpus(RANKS, _job, preset, options, ranks_per_node=PER_NODE, moves_data=False)[0]


CELLS = [
    *product(PRESETS, ("overlap", "no_overlap")),
    *(("zero3", "one_stage"), ("mics", "codecs"), ("mics", "two_nodes")),
    *(("mics", "prefetch"), ("paro-nii", "int8"), ("paro-iig", "micro_step"), ("paro-nig", "bf16")),
    *(("mics", "coalesced"), ("zero2", "coalesced"), ("zero3", "coalesced"), ("paro-iig", "coalesced")),
]


@pytest.mark.wide(every=5)
@pytest.mark.parametrize(("preset", "option"), CELLS)
def test_ranks_that_use_different_layers_do_not_wait_in_a_circle(preset: str, option: str) -> None:
    """Not even where every launch blocks, as under CUDA_LAUNCH_BLOCKING=1; and nothing races on any rank."""
    _check(launch(preset, **OPTIONS[option]))


def _check(machines: list[Machine]) -> None:
    launches = [machine.launches for machine in machines]
    assert find_mismatch(launches) == ""
    assert find_circle(launches) == []
    assert find_circle(launches, blocking=True) == []
    assert max(map(most_at_once, launches)) <= MOST_AT_ONCE
    assert [find_stall(launches, MOST_AT_ONCE, Random(seed)) for seed in range(3)] == [[]] * 3
    assert [machine.races for machine in machines] == [[]] * RANKS
    assert [machine.works.num_in_flight for machine in machines] == [0] * RANKS


def _island_job(ctx: RankContext, machine: Machine, preset: str, options: dict[str, Any]) -> None:
    training = start(machine, config_of(preset, ranks_per_node=PER_NODE, **options), rank=ctx.rank)
    training.micro_steps = 1
    for _ in range(6):
        training.step()


@pytest.mark.parametrize("preset", ["mics", "ddp", "paro-nii"])
@pytest.mark.parametrize(
    "options",
    [{"outer_delay": 1}, {"outer_delay": 1, "outer_fragments": 2, "outer_codec": "int8"}],
    ids=["delay", "fragments"],
)
def test_islands_step_under_an_outer_step_in_flight(preset: str, options: dict[str, Any]) -> None:
    """It takes the room of the second hop between nodes, which islands of one node do not have."""
    fields = {"outer_every": 2, **options}
    machines = simulate_gpus(RANKS, _island_job, preset, fields, ranks_per_node=PER_NODE)[0]
    launches = [machine.launches for machine in machines]
    assert find_mismatch(launches) == ""
    assert find_circle(launches) == []
    assert max(map(most_at_once, launches)) <= MOST_AT_ONCE
    assert [find_stall(launches, MOST_AT_ONCE, Random(seed)) for seed in range(3)] == [[]] * 3
    assert [machine.races for machine in machines] == [[]] * RANKS


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_goes_on_where_three_collectives_have_room(preset: str) -> None:
    launches = [machine.launches for machine in launch(preset)]
    assert max(map(most_at_once, launches)) <= MOST_AT_ONCE
    for num_slots, stalls in ((1, True), (MOST_AT_ONCE, False)):
        assert any(find_stall(launches, num_slots, Random(seed)) for seed in range(50)) is stalls


def _recomputing_job(ctx: RankContext, machine: Machine, preset: str, build: str, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = BUILDS[build]()
    config = config_of(preset, ranks_per_node=PER_NODE, **options)
    sharded = shard(model, config, units=[Residual, Nest, Shift], device=machine.device)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(model.parameters(), lr=0.01)]
    batch = torch.randn(4, WIDTH).to(machine.device)
    training = Training(model, sharded, optimizers, machine, batch, micro_steps=1)
    for by_rank in STEPS:
        training.options = {"unseen": by_rank.get(ctx.rank, ())}
        training.step()


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("preset", "option"), [("zeropp", "overlap"), ("paro-igg", "no_overlap")])
def test_ranks_that_use_different_recomputed_units_do_not_wait_in_a_circle(
    preset: str, build: str, option: str
) -> None:
    """Checkpoints around several units, also nested ones."""
    arguments = (preset, build, OPTIONS[option])
    _check(simulate_gpus(RANKS, _recomputing_job, *arguments, ranks_per_node=PER_NODE, moves_data=False)[0])


def _two_hops(ctx: RankContext, machine: Machine, shares: bool) -> None:
    """Sums in a node and sums across nodes; ranks 0 and 3 start the second hop earlier than ranks 1 and 2."""
    groups = [(ranks, dist.new_group(ranks)) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    intra_node, inter_node = (group for ranks, group in groups if ctx.rank in ranks)
    first = torch.cuda.Stream()
    second = first if shares else torch.cuda.Stream()
    hops = [(first, intra_node, 2), (second, inter_node, 2), (first, intra_node, 1)]
    for stream, group, numel in hops if ctx.rank in (0, 3) else [hops[0], hops[2], hops[1]]:
        with torch.cuda.stream(stream):
            dist.all_reduce(torch.ones(numel, device=machine.device), group=group, async_op=True).wait()


@pytest.mark.parametrize("shares", [True, False])
def test_one_stream_for_both_hops_is_found(shares: bool) -> None:
    """What this file is to find, planted."""
    machines = simulate_gpus(RANKS, _two_hops, shares, ranks_per_node=PER_NODE, moves_data=False)[0]
    launches = [machine.launches for machine in machines]
    assert find_mismatch(launches) == ""
    assert len(find_circle(launches)) == (4 if shares else 0)
    assert len(find_circle(launches, blocking=True)) == 4


def _another_size(ctx: RankContext, machine: Machine) -> None:
    group = dist.new_group()  # what is sent in the default one is carried out
    dist.all_reduce(torch.ones(1 + ctx.rank, device=machine.device), group=group, async_op=True).wait()


def test_ranks_that_launch_different_things_are_found() -> None:
    machines = simulate_gpus(RANKS, _another_size, ranks_per_node=PER_NODE, moves_data=False)[0]
    assert "rank 0 launched `allreduce_ 1 of 1`, rank 1" in find_mismatch([machine.launches for machine in machines])
