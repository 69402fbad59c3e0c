"""Can `Trainer(strategy="mics")` be written, in both namespaces, with and without importing the package?"""

import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry

from mics_strategy import Codec, ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.lightning import MiCSStrategy, strategy_for
from mics_strategy.lightning.registration import PostImportHook, names, register, register_in
from tests.lightning.modules import Plain
from tests.lightning.runs import trainer
from tests.ranks import RankContext


def _resolved(namespace: ModuleType, strategy: Any, tmp_path: Path) -> Any:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "default_root_dir": tmp_path}
    return namespace.Trainer(strategy=strategy, **options).strategy


@pytest.mark.parametrize("namespace", [lightning.pytorch, pytorch_lightning], ids=lambda n: n.__name__)
@pytest.mark.parametrize(("name", "preset"), [("mics", "mics"), ("MiCS_Zero1", "zero1"), ("mics_paro_iig", "paro-iig")])
def test_a_name_in_any_case_gives_the_strategy_of_the_namespace(
    namespace: ModuleType, name: str, preset: str, tmp_path: Path
) -> None:
    strategy = _resolved(namespace, name, tmp_path)
    assert type(strategy) is strategy_for(namespace.__name__)
    assert isinstance(strategy, namespace.strategies.ParallelStrategy)
    assert strategy.config == ShardConfig.preset(preset)


def test_every_preset_has_a_name_and_its_arguments_in_the_registry() -> None:
    assert {f"mics_{p.replace('-', '_')}" for p in ShardConfig.PRESETS} - {"mics_mics"} <= dict(names()).keys()
    for name, init_params in names():
        assert name == name.lower()
        assert StrategyRegistry[name]["init_params"] == init_params
        assert isinstance(StrategyRegistry.get(name), ParallelStrategy)


def test_registering_again_changes_nothing() -> None:
    before, finders = dict(StrategyRegistry), list(sys.meta_path)
    register()
    assert dict(StrategyRegistry) == before
    assert sys.meta_path == finders
    assert sum(isinstance(finder, PostImportHook) for finder in finders) == 1


def test_a_name_of_somebody_else_is_left_alone() -> None:
    module = ModuleType("strategies")
    module.StrategyRegistry = type(StrategyRegistry)()
    module.StrategyRegistry.register("mics", Plain)
    register_in(module, "lightning.pytorch")
    assert module.StrategyRegistry["mics"]["strategy"] is Plain
    assert "mics_zero3" in module.StrategyRegistry


def test_an_unknown_namespace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lightning\.pytorch.*pytorch_lightning"):
        strategy_for("lightning")


def test_a_registered_name_may_carry_a_checkpoint_io(one_rank: RankContext) -> None:
    plugin = TorchCheckpointIO()
    StrategyRegistry.register("mics_with_io", MiCSStrategy, checkpoint_io=plugin)
    try:
        assert trainer(one_rank, "mics_with_io").strategy.checkpoint_io is plugin
    finally:
        StrategyRegistry.remove("mics_with_io")


# Lightning's own use of jsonargparse
of_lightning = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


@of_lightning
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trainer.strategy=mics_zero2"], ShardConfig.preset("zero2")),
        (
            [
                "--trainer.strategy=mics_strategy.lightning.MiCSStrategy",
                "--trainer.strategy.config=zero3",
                "--trainer.strategy.partition_size=8",
                "--trainer.strategy.hierarchical=false",
                "--trainer.strategy.reduce_dtype=bfloat16",
                "--trainer.strategy.units=[Linear]",
            ],
            ShardConfig.preset("zero3", partition_size=8, hierarchical=False, reduce_dtype=torch.bfloat16),
        ),
        (
            ["--trainer.strategy=mics_strategy.lightning.MiCSStrategy", "--trainer.strategy.hierarchical=65536"],
            ShardConfig(hierarchical=65536),
        ),
    ],
)
def test_the_command_line_parses_names_and_options(
    arguments: list[str], expected: ShardConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    common = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", "--seed_everything=false"]
    cli = LightningCLI(Plain, args=[*arguments, *common], run=False, save_config_callback=None)
    assert type(cli.trainer.strategy) is MiCSStrategy
    assert cli.trainer.strategy.config == expected


@of_lightning
def test_a_config_file_parses_a_whole_shard_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    Path("config.yaml").write_text(
        textwrap.dedent("""
            seed_everything: false
            trainer:
              accelerator: cpu
              devices: 1
              logger: false
              strategy:
                class_path: mics_strategy.lightning.MiCSStrategy
                init_args:
                  config: {partition_size: world, optimizer: 4, reduce_dtype: bfloat16}
                  overlap: [gather]
                  grad_codec: {bits: 4, block_size: 64, feedback: true, rotation: true}
                  timeout: "0:01:00"
        """)
    )
    cli = LightningCLI(Plain, args=["--config=config.yaml"], run=False, save_config_callback=None)
    codec = Codec(bits=4, block_size=64, feedback=True, rotation=True)
    expected = ShardConfig(
        partition_size="world", optimizer=4, reduce_dtype="bfloat16", overlap={"gather"}, grad_codec=codec
    )
    assert cli.trainer.strategy.config == expected
