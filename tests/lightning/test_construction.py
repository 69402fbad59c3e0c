"""Do arguments and the Trainer's connections arrive, and are impossible ones refused?"""

from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from mics_strategy import ShardConfig
from mics_strategy.errors import ConfigError, LifecycleError
from mics_strategy.lightning import MiCSStrategy
from tests.lightning.modules import Plain, loader
from tests.lightning.runs import mics, run, trainer
from tests.ranks import RankContext, RankPool, assert_refused, raises_on_every_rank, refusal


def test_every_option_of_the_config_is_an_argument() -> None:
    strategy = mics("zero1", partition_size=8, prefetch=3)
    assert strategy.config == ShardConfig.preset("zero1", partition_size=8, prefetch=3)
    assert mics(ShardConfig(params="none"), prefetch=2).config == ShardConfig(params="none", prefetch=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": "zero4"}, "zero4"),
        ({"partition": 8}, "partition"),
        ({"config": ShardConfig(), "partition": 8}, "partition.*Use one of .*partition_size"),
        ({"partition_size": 0}, "partition_size=0"),
        ({"start_method": "thread"}, "start_method='thread'.*'fork'"),
        ({"sigterm_check_every_n_steps": 0}, "sigterm_check_every_n_steps=0"),
    ],
)
def test_an_unknown_or_impossible_argument_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MiCSStrategy(**arguments)


def test_the_trainer_sets_nodes_and_ranks(one_rank: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("NODE_RANK", "2")
    strategy = trainer(one_rank, "mics", devices=4, num_nodes=3).strategy
    assert (strategy.num_nodes, strategy.num_processes, strategy.world_size) == (3, 4, 12)
    assert (strategy.global_rank, strategy.local_rank) == (9, 1)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 12, "rank": 9}
    assert strategy.root_device == torch.device("cpu")


def test_devices_of_the_strategy_and_the_trainer_must_agree() -> None:
    with pytest.raises(MisconfigurationException, match="choose one device type"):
        Trainer(strategy=mics(parallel_devices=[torch.device("cpu")]), accelerator="cuda")


def test_an_accelerator_without_shards_is_refused(one_rank: RankContext) -> None:
    strategy = trainer(one_rank, "mics").strategy
    strategy.accelerator = object()
    with pytest.raises(ConfigError, match=r"accelerator=object.*cuda"):
        strategy._configure_launcher()


def test_the_handle_is_refused_before_the_model_is_sharded(one_rank: RankContext) -> None:
    with pytest.raises(LifecycleError, match=r"not sharded yet.*on_fit_start"):
        _ = trainer(one_rank, "mics").strategy.sharded


def test_backend_and_timeout_reach_the_process_group(one_rank: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, Any]] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    strategy = mics(
        process_group_backend="fancy", timeout=timedelta(seconds=7), cluster_environment=LightningEnvironment()
    )
    fitting = trainer(one_rank, strategy)
    module = Plain()
    module.trainer = fitting
    strategy.connect(module)
    strategy.setup_environment()
    ((backend,), options) = calls[0]
    assert backend == "fancy"
    assert (options["timeout"], options["world_size"], options["device_id"]) == (timedelta(seconds=7), 1, None)


def _fit(ctx: RankContext, config: dict[str, Any]) -> None:
    trainer(ctx, mics(**config), max_steps=1).fit(Plain(), loader())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"partition_size": 3}, "partition_size=3.*4 ranks"),
        ({"partition_size": 8}, "partition_size=8.*4 ranks"),
        ({"params": "world", "optimizer": "none"}, "coarser"),
        ({"units": "Conv3d"}, "Conv3d.*Linear"),
    ],
)
def test_what_does_not_fit_the_job_is_refused_on_every_rank(
    ranks: RankPool, config: dict[str, Any], message: str
) -> None:
    assert_refused(run(ranks, 4, refusal, _fit, config), ConfigError, message)


def _fit_with(ctx: RankContext, callback: Any, arguments: Any) -> None:
    trainer(ctx, "mics", max_epochs=2, callbacks=[callback(*arguments)]).fit(Plain(), loader())


AVERAGES = {"StochasticWeightAveraging": (0.1,), "EMAWeightAveraging": ()}  # the latter since Lightning 2.6


@pytest.mark.parametrize("name", [name for name in AVERAGES if hasattr(callbacks, name)])
def test_a_callback_that_copies_the_model_is_refused_on_every_rank(ranks: RankPool, name: str) -> None:
    callback, message = getattr(callbacks, name), f"{name}.*does not work on shards"
    raises_on_every_rank(lambda: run(ranks, 2, _fit_with, callback, AVERAGES[name]), ConfigError, message)
