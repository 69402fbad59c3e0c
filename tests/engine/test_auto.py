"""Do models train with scopes and partitions that `shard` has chosen, and does rank 0 say why?"""

import contextlib
import dataclasses
import io
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.auto_scopes import description_of
from mics_strategy.engine.units import find_units
from mics_strategy.errors import ConfigError, NoFeasiblePlan
from mics_strategy.planner.auto import AutoJob
from mics_strategy.planner.memory import MicroBatch, Overheads, rank_memory
from mics_strategy.planner.scope_search import job_cluster, price
from mics_strategy.scopes import resolve_scopes
from tests import models
from tests.engine.training import Run, assert_same, plain, start, train_without_reading
from tests.ranks import RankContext, RankPool, raises_on_every_rank

AUTO = ShardConfig.preset("auto")
TWO_NODES = Topology(ranks_per_node=2)  # of 4 ranks


def lora() -> models.Case:
    """A transformer of which a few parameters are trained."""
    case = models.transformer()

    def build() -> nn.Module:
        model = case.build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "norm.weight" or "norm1" in name)
        assert any(parameter.requires_grad for parameter in model.parameters())
        return model

    return models.Case(build=build, batch=case.batch, loss=case.loss, units=case.units)


def machine_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def job_of(case: models.Case) -> AutoJob:
    """What 2 nodes of 2 ranks on this machine know of a case."""
    model = description_of(find_units(case.build(), case.units))
    memory_bytes = machine_bytes() // TWO_NODES.ranks_per_node
    return AutoJob(model=model, topology=TWO_NODES, world_size=4, memory_bytes=memory_bytes, backend="gloo")


def leaving(config: ShardConfig, limit_bytes: int, job: AutoJob) -> ShardConfig:
    """The configuration, with all but so much memory left to activations."""
    return config.replace(activation_bytes=job.memory_bytes - limit_bytes)


@pytest.mark.parametrize("case", [models.transformer, lora], ids=lambda case: case.__name__)
def test_chosen_scopes_train_as_plain(ranks: RankPool, case: object) -> None:
    run = Run(case=case, config=AUTO, accumulation=2)
    for found in ranks(4, train_without_reading, run, ranks_per_node=2):
        assert_same(found, plain(run, 4).parameters)


def chosen(ctx: RankContext, run: Run) -> tuple[tuple[int, ...], ShardConfig, dict[str, torch.Tensor]]:
    training = start(ctx, run)
    for step in range(run.steps):
        training.step(step)
    scopes, config = training.sharded.scopes, training.sharded.config
    return (scopes.params, scopes.grads, scopes.optimizer, scopes.secondary), config, training.parameters()


def test_every_rank_chooses_the_same_scopes_and_keeps_other_options(ranks: RankPool) -> None:
    found = ranks(4, chosen, Run(case=lora, config=AUTO), ranks_per_node=2)
    assert [(scopes, config) for scopes, config, _ in found] == [((1, 1, 1, 1), AUTO)] * 4


def test_scopes_chosen_for_little_memory_shard_every_state_and_train_as_plain(ranks: RankPool) -> None:
    """A quarter of a step's states fit: the job has few scopes to choose from, and takes the fastest of them."""
    job = job_of(models.transformer())
    candidates = price(AUTO, job, job_cluster(AUTO, job))
    sizes = sorted({candidate.memory.total_bytes for candidate in candidates})
    config = leaving(AUTO, sizes[2], job)
    fitting = [candidate for candidate in candidates if candidate.memory.total_bytes <= sizes[2]]
    best = min(fitting, key=lambda candidate: candidate.seconds)
    run = Run(case=models.transformer, config=config, accumulation=2)
    for scopes, _, parameters in ranks(4, chosen, run, ranks_per_node=2):
        fastest = (best.scopes.params, best.scopes.grads, best.scopes.optimizer)
        assert (scopes[:3], scopes[2]) == (fastest, 4)
        assert_same(parameters, plain(run, 4).parameters)


def test_a_partition_on_cpus_is_a_node_and_grows_where_memory_ends(ranks: RankPool) -> None:
    config, job = ShardConfig.preset("mics"), job_of(models.transformer())
    node_bytes, world_bytes = (
        rank_memory(
            job.model, sized, resolve_scopes(sized, TWO_NODES, 4), MicroBatch(), overheads=Overheads.of("gloo")
        ).total_bytes
        for sized in (config.replace(partition_size=2), config.replace(partition_size=4))
    )
    assert world_bytes < node_bytes
    for limit_bytes, expected in ((node_bytes, 2), (node_bytes - 1, 4)):
        run = Run(case=models.transformer, config=leaving(config, limit_bytes, job), accumulation=2)
        for scopes, _, parameters in ranks(4, chosen, run, ranks_per_node=2):
            assert scopes == (expected,) * 4
            assert_same(parameters, plain(run, 4).parameters)


def printed(ctx: RankContext, config: ShardConfig) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with torch.device("meta"):
            model = models.mlp().build()
        shard(model, config)
    return out.getvalue()


def test_rank_0_prints_the_choice_and_the_reasons(ranks: RankPool) -> None:
    found = ranks(2, printed, AUTO)
    assert "mics_strategy chose parameters over 1, gradients over 1, optimizer states over 1 ranks" in found[0]
    assert found[1] == ""


def test_rank_0_prints_the_size_of_a_partition_that_is_not_a_node(ranks: RankPool) -> None:
    job = dataclasses.replace(job_of(models.mlp()), world_size=4)
    config = leaving(ShardConfig.preset("mics"), 0, job)
    found = ranks(4, printed, config, ranks_per_node=2)
    assert "chose partition_size=4: states, buffers and communicators need" in found[0]
    assert "No size leaves as much to activations" in found[0]
    assert found[1:] == ["", "", ""]
    of_node = ranks(4, printed, ShardConfig.preset("mics"), ranks_per_node=2)
    assert "partition_size" not in of_node[0]


def huge() -> nn.Module:
    """A model on the meta device, larger than this machine's memory."""
    with torch.device("meta"):
        return nn.Linear(1 << 20, machine_bytes() >> 20, bias=False)


def shard_huge(ctx: RankContext, config: ShardConfig) -> None:
    shard(huge(), config)


@pytest.mark.parametrize("preset", ["auto", "mics"])
def test_a_model_that_fits_nowhere_is_refused_on_every_rank(ranks: RankPool, preset: str) -> None:
    words = r"does not fit into the .* GB of a rank: the smallest scopes, .* GB too many. Use more nodes"
    raises_on_every_rank(
        lambda: ranks(2, shard_huge, ShardConfig.preset(preset), ranks_per_node=2), NoFeasiblePlan, words
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": "auto"}, "`grads='partition'` is set, but other scopes are 'auto'.*all to 'auto', or none"),
        ({"params": "auto", "grads": "auto", "optimizer": "world"}, "`optimizer='world'` is set, but other"),
        (dict.fromkeys(("params", "grads", "optimizer"), "auto") | {"secondary_params": 2}, "still to be chosen"),
        ({"secondary_params": "auto"}, "`secondary_params='auto'` is chosen with the scopes, and `params="),
        ({"cluster": "p4d.24xlarge"}, "`cluster='p4d.24xlarge'` counts for scopes that are chosen, and `params="),
        ({"micro_steps": 4}, "`micro_steps=4` counts for scopes that are chosen"),
        (
            dict.fromkeys(("params", "grads", "optimizer", "secondary_params"), "auto") | {"partition_size": 2},
            "`partition_size=2` is the size of scopes 'partition', and 'auto' scopes are chosen with their sizes",
        ),
    ],
)
def test_scopes_that_are_chosen_together_are_given_together(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardConfig(**options)


def test_scopes_that_are_not_chosen_yet_are_no_numbers() -> None:
    with pytest.raises(ConfigError, match="still to be chosen"):
        resolve_scopes(AUTO, Topology(ranks_per_node=2), 4)


def shard_badly(ctx: RankContext, config: ShardConfig) -> None:
    shard(models.mlp().build(), config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topology": Topology(ranks_per_node=3)}, "`ranks_per_node=3` does not divide the 4 ranks"),
        ({"cluster": "p4e"}, "`p4e` is no cluster of the catalog"),
        ({"world_size": 8}, "planned for `world_size=8` ranks, and the job has 4"),
    ],
)
def test_a_job_that_does_not_fit_its_configuration_is_refused(ranks: RankPool, options: dict, words: str) -> None:
    config = ShardConfig.preset("auto", **options)
    raises_on_every_rank(lambda: ranks(4, shard_badly, config), ConfigError, words)


def shard_with_own_file(ctx: RankContext, folder: str) -> None:
    """The file of a cluster, which differs between the nodes."""
    file = Path(folder) / f"{ctx.rank}" / "lab.yaml"
    file.parent.mkdir()
    link = f"{{bandwidth: {ctx.rank + 1} GB/s, latency: 1 us, source: a test}}"
    file.write_text(f"like: p4d.24xlarge\ninter_node: {link}\n")
    os.chdir(file.parent)
    try:
        shard_badly(ctx, ShardConfig.preset("auto", cluster="lab.yaml"))
    finally:
        os.chdir(folder)


def test_files_of_a_cluster_that_differ_between_nodes_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    words = "`cluster` differs between ranks: Cluster"
    raises_on_every_rank(lambda: ranks(2, shard_with_own_file, str(tmp_path)), ConfigError, words)
