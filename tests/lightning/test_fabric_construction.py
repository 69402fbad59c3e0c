"""Can `Fabric(strategy="mics")` be written, in both namespaces, and are arguments passed on or refused?"""

import subprocess
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import lightning.fabric
import lightning_fabric
import pytest
import torch
from lightning.fabric.plugins import (
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TorchCheckpointIO,
)
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY, ParallelStrategy

from mics_strategy import ShardConfig
from mics_strategy.errors import ConfigError, LifecycleError
from mics_strategy.lightning import MiCSFabricStrategy, fabric_strategy_for
from mics_strategy.lightning.registration import names
from tests.lightning.fabric_runs import mics, values
from tests.lightning.modules import Net
from tests.lightning.runs import assert_same, run
from tests.ranks import RankContext, RankPool

NAMESPACES = (lightning.fabric, lightning_fabric)


def _resolved(strategy: Any, namespace: ModuleType = lightning.fabric, **options: Any) -> Any:
    return namespace.Fabric(strategy=strategy, **{"accelerator": "cpu", "devices": 1, **options}).strategy


@pytest.mark.parametrize("namespace", NAMESPACES, ids=lambda n: n.__name__)
@pytest.mark.parametrize(("name", "preset"), [("mics", "mics"), ("MiCS_Zero1", "zero1"), ("mics_paro_iig", "paro-iig")])
def test_a_name_in_any_case_gives_the_strategy_of_the_namespace(namespace: ModuleType, name: str, preset: str) -> None:
    strategy = _resolved(name, namespace)
    assert type(strategy) is fabric_strategy_for(namespace.__name__)
    assert isinstance(strategy, namespace.strategies.ParallelStrategy)
    assert strategy.config == ShardConfig.preset(preset)


def test_every_preset_has_a_name_and_its_arguments_in_the_registry() -> None:
    for name, init_params in names():
        assert STRATEGY_REGISTRY[name]["init_params"] == init_params
        assert isinstance(STRATEGY_REGISTRY.get(name), ParallelStrategy)


def _steps(ctx: RankContext, name: str) -> Any:
    namespace = {"lightning.fabric": lightning.fabric, "lightning_fabric": lightning_fabric}[name]
    fabric = namespace.Fabric(strategy="mics", accelerator="cpu", devices=ctx.ranks_per_node, num_nodes=ctx.num_nodes)
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, 6)).sum())
    optimizer.step()
    fabric.save(ctx.tmp_path / "model.ckpt", {"model": model, "optimizer": optimizer})
    fabric.load(ctx.tmp_path / "model.ckpt", {"model": model, "optimizer": optimizer})
    return values(model)


def test_both_namespaces_train_alike(ranks: RankPool) -> None:
    found, expected = (run(ranks, 2, _steps, namespace.__name__)[0] for namespace in NAMESPACES)
    assert_same(found, expected, tolerance=0)


def test_an_unknown_namespace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lightning\.fabric.*lightning_fabric"):
        fabric_strategy_for("lightning.pytorch")


def test_every_option_of_the_config_is_an_argument() -> None:
    strategy = mics("zero1", partition_size=8, prefetch=3)
    assert strategy.config == ShardConfig.preset("zero1", partition_size=8, prefetch=3)
    assert mics(ShardConfig(params="none"), prefetch=2).config == ShardConfig(params="none", prefetch=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": "zero4"}, "zero4"),
        ({"partition": 8}, "partition"),
        ({"partition_size": 0}, "partition_size=0"),
        ({"start_method": "thread"}, "start_method='thread'.*'fork'"),
        ({"state_dict_type": "half"}, "state_dict_type='half'.*'sharded'"),
        ({"save_asynchronously": True}, "save_asynchronously=True.*sharded"),
        ({"precision": FSDPPrecision("bf16-mixed")}, "precision=FSDPPrecision.*bf16-mixed"),
    ],
)
def test_an_unknown_or_impossible_argument_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MiCSFabricStrategy(**arguments)


@pytest.mark.parametrize(
    ("precision", "plugin"),
    [
        ("32-true", Precision),
        ("64-true", DoublePrecision),
        ("bf16-true", HalfPrecision),
        ("16-true", HalfPrecision),
        ("bf16-mixed", MixedPrecision),
    ],
)
def test_a_precision_name_becomes_the_plugin_of_any_strategy(precision: Any, plugin: type[Any]) -> None:
    assert type(_resolved("mics", precision=precision).precision) is plugin


def test_plugins_arrive_and_those_of_other_strategies_are_refused() -> None:
    plugin = TorchCheckpointIO()
    assert _resolved("mics", plugins=[plugin]).checkpoint_io is plugin
    with pytest.raises(ConfigError, match=r"FSDPPrecision.*bf16-mixed"):
        _resolved("mics", plugins=[FSDPPrecision("bf16-mixed")])


def test_fabric_sets_nodes_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("NODE_RANK", "2")
    strategy = _resolved("mics", devices=4, num_nodes=3)
    assert (strategy.num_nodes, strategy.num_processes, strategy.world_size) == (3, 4, 12)
    assert (strategy.global_rank, strategy.local_rank) == (9, 1)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 12, "rank": 9}


def test_an_accelerator_without_shards_is_refused() -> None:
    strategy = _resolved("mics")
    strategy.accelerator = object()
    with pytest.raises(ConfigError, match=r"accelerator=object.*cuda"):
        strategy._configure_launcher()


def test_backend_and_timeout_reach_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, Any]] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    options = {"process_group_backend": "fancy", "timeout": timedelta(seconds=7)}
    _resolved(mics(cluster_environment=LightningEnvironment(), **options)).setup_environment()
    ((backend,), passed) = calls[0]
    assert (backend, passed["timeout"], passed["world_size"]) == ("fancy", timedelta(seconds=7), 1)


@pytest.mark.slow
def test_fabric_alone_is_enough() -> None:
    code = (
        "import sys, mics_strategy\n"
        "from lightning_fabric import Fabric\n"
        "strategy = Fabric(strategy='mics', accelerator='cpu', devices=1).strategy\n"
        "print(type(strategy).__name__, 'pytorch_lightning' in sys.modules, 'lightning' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.stdout.split() == ["LightningFabricMiCSStrategy", "False", "False"], child.stderr


def _not_launched(ctx: RankContext) -> None:
    fabric = lightning.fabric.Fabric(strategy="mics", accelerator="cpu", devices=1)
    with pytest.raises(LifecycleError, match=r"Call `fabric.launch\(\)` first"):
        fabric.strategy.setup_module(Net())  # past a check of newer versions of Fabric


def test_setting_up_before_launching_is_refused(ranks: RankPool) -> None:
    run(ranks, 1, _not_launched, default_group=False)
