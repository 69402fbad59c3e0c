"""Do scripts that never import mics_strategy train with it, where they ask for it and only there?"""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.interpreters import python_path

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
AUTOLOAD = ROOT / "mics_strategy" / "autoload"


def _python(code: str, *path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter."""
    env = {**os.environ, "PYTHONPATH": python_path(*path), **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
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


def test_the_autoload_module_imports_nothing_but_what_python_has_loaded() -> None:
    code = (AUTOLOAD / "mics_strategy_autoload" / "__init__.py").read_text()
    top_level = [line for line in code.splitlines() if line.startswith(("import", "from"))]
    assert top_level == ["import os", "import sys"]


def test_the_entry_point_is_never_found_without_its_module(tmp_path: Path) -> None:
    """An egg-info in the project's root would break `import torch` there for every other Python."""
    autoload = AUTOLOAD.relative_to(ROOT)
    for folder in ("mics_strategy", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert [path.parent for path in tmp_path.rglob("*.egg-info")] == [tmp_path / autoload]


# -- Accelerate ------------------------------------------------------------------------------------------------

ASKED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "mics", "ACCELERATE_USE_CPU": "true"}
BY_ACCELERATE = "from accelerate import Accelerator"
# Whatever a script imports first: torch is half imported then, or Accelerate, or transformers.
FIRST = {
    "accelerate": BY_ACCELERATE,
    "torch": f"import torch; {BY_ACCELERATE}",
    "transformers": f"from transformers import Trainer, TrainingArguments; {BY_ACCELERATE}",
    "lightning": f"import lightning.pytorch; {BY_ACCELERATE}",
    "a part": f"from accelerate.utils import set_seed; {BY_ACCELERATE}",
}
CONSTRUCT = "; print(type(Accelerator()).__name__)"


@pytest.mark.wide
@pytest.mark.parametrize("first", FIRST)
def test_an_accelerator_that_the_launcher_asks_for_is_ours_without_any_import(tmp_path: Path, first: str) -> None:
    path = (_installed(tmp_path, "mics_strategy_autoload:install"), AUTOLOAD, ROOT)
    child = _python(FIRST[first] + CONSTRUCT, *path, **ASKED)
    assert child.stdout.split() == ["MiCSAccelerator"], child.stderr


@pytest.mark.wide
@pytest.mark.parametrize("version", ["", "1", "2"])
def test_where_the_launcher_does_not_ask_nothing_is_loaded(tmp_path: Path, version: str) -> None:
    path = (_installed(tmp_path, "mics_strategy_autoload:install"), AUTOLOAD, ROOT)
    code = f"import sys; {BY_ACCELERATE}; print([name for name in sys.modules if name.startswith('mics_strategy.')])"
    child = _python(code, *path, FSDP_VERSION=version)
    assert child.stdout.strip() == "[]", child.stderr


def test_a_broken_package_is_told_and_trains_nothing_else(tmp_path: Path) -> None:
    broken = tmp_path / "mics_strategy"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('half installed')\n")
    child = _python(
        BY_ACCELERATE + CONSTRUCT, _installed(tmp_path, "mics_strategy_autoload:install"), AUTOLOAD, **ASKED
    )
    assert (child.returncode, child.stdout) == (1, "")
    assert "`fsdp_version: mics` cannot be read: RuntimeError('half installed')" in child.stderr


def test_without_the_autoload_such_a_script_fails_loudly() -> None:
    child = _python(BY_ACCELERATE + CONSTRUCT, ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **ASKED)
    assert (child.returncode, child.stdout) == (1, "")
    assert "invalid literal for int() with base 10: 'mics'" in child.stderr


def test_an_adapter_that_fails_while_it_installs_itself_shards_nothing() -> None:
    code = """
    import os, accelerate
    del accelerate.utils.load_fsdp_optimizer
    os.environ["FSDP_VERSION"] = "mics"
    try:
        import mics_strategy.accelerate
    except AttributeError:
        accelerate.Accelerator()
    """
    child = _python(code, ROOT, **ASKED | {"FSDP_VERSION": "2"})
    assert child.returncode == 1
    assert "invalid literal for int() with base 10: 'mics'" in child.stderr
