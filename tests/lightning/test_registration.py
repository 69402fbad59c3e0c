"""Can `Trainer(strategy="mics")` be written, in both namespaces, with and without importing the package?"""

import os
import shutil
import subprocess
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

import mics_strategy.lightning
from mics_strategy import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.lightning import MiCSStrategy, strategy_for
from mics_strategy.lightning.registration import AfterImport, names, register, register_in
from tests.lightning.modules import Plain
from tests.lightning.runs import trainer
from tests.ranks import RankContext

ROOT = Path(mics_strategy.lightning.__file__).parents[2]
AUTOLOAD = ROOT / "mics_strategy" / "lightning" / "autoload"


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
    assert sum(isinstance(finder, AfterImport) for finder in finders) == 1


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
                  timeout: "0:01:00"
        """)
    )
    cli = LightningCLI(Plain, args=["--config=config.yaml"], run=False, save_config_callback=None)
    expected = ShardConfig(partition_size="world", optimizer=4, reduce_dtype="bfloat16", overlap={"gather"})
    assert cli.trainer.strategy.config == expected


def _python(code: str, *path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


def test_importing_the_package_loads_no_lightning() -> None:
    child = _python(
        """
        import sys
        import mics_strategy, mics_strategy.lightning.registration
        mics_strategy.lightning.registration.register()
        print([name for name in sys.modules if "lightning" in name and not name.startswith("mics_strategy")])
        """,
        ROOT,
    )
    assert child.stdout.strip() == "[]", child.stderr


def _installed(tmp_path: Path, entry_point: str) -> Path:
    """A directory that looks like an installed distribution with one entry point of the group that torch loads."""
    info = tmp_path / "autoload_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: autoload-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\nmics_strategy_test = {entry_point}\n")
    return tmp_path


NAMES = ["MiCSStrategy", "PytorchLightningMiCSStrategy", "MiCSFabricStrategy", "LightningFabricMiCSStrategy"]
RESOLVE = """
    import sys
    import torch
    print("mics_strategy" in sys.modules)
    import lightning.pytorch.strategies, pytorch_lightning.strategies
    import lightning.fabric.strategies, lightning_fabric.strategies
    trainers = (lightning.pytorch.strategies.StrategyRegistry, pytorch_lightning.strategies.StrategyRegistry)
    fabrics = (lightning.fabric.strategies.STRATEGY_REGISTRY, lightning_fabric.strategies.STRATEGY_REGISTRY)
    for registry in trainers + fabrics:
        print(type(registry.get("mics_zero3")).__name__ if "mics" in registry else "unknown")
"""


def test_the_name_is_known_without_any_import_once_installed(tmp_path: Path) -> None:
    child = _python(RESOLVE, _installed(tmp_path, "mics_strategy_autoload:install"), AUTOLOAD, ROOT)
    assert child.stdout.split() == ["False", *NAMES], child.stderr


def test_the_autoload_can_be_switched_off(tmp_path: Path) -> None:
    path = (_installed(tmp_path, "mics_strategy_autoload:install"), AUTOLOAD, ROOT)
    child = _python(RESOLVE, *path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert child.stdout.split() == ["False", *["unknown"] * 4], child.stderr


def test_a_broken_package_breaks_neither_torch_nor_lightning(tmp_path: Path) -> None:
    broken = tmp_path / "mics_strategy"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('half installed')\n")
    child = _python(RESOLVE, _installed(tmp_path, "mics_strategy_autoload:install"), AUTOLOAD)
    assert child.stdout.split() == ["False", *["unknown"] * 4], child.stderr
    assert child.stderr.count("half installed") == 4


def test_the_autoload_and_the_package_share_the_work(tmp_path: Path) -> None:
    child = _python(
        "import mics_strategy.lightning.registration as r\nr.register()\n" + textwrap.dedent(RESOLVE), AUTOLOAD, ROOT
    )
    assert child.stdout.split() == ["True", *NAMES], child.stderr


def test_the_autoload_module_imports_nothing_but_sys() -> None:
    code = (AUTOLOAD / "mics_strategy_autoload" / "__init__.py").read_text()
    top_level = [line for line in code.splitlines() if line.startswith(("import", "from"))]
    assert top_level == ["import sys"]


def test_the_entry_point_is_never_found_without_its_module(tmp_path: Path) -> None:
    """An egg-info in the project's root would break `import torch` there for every other Python."""
    autoload = AUTOLOAD.relative_to(ROOT)
    shutil.copytree(AUTOLOAD, tmp_path / autoload, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=55)
    assert [path.parent for path in tmp_path.rglob("*.egg-info")] == [tmp_path / autoload]
