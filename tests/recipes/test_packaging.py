"""The folder `recipes` is installed as `mics_strategy.recipes`, with its YAML files, and under no other name."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

BUILD = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")


def test_the_list_of_packages_is_complete(repository: Path):
    settings = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = [*(repository / "mics_strategy").rglob("__init__.py"), *(repository / "recipes").rglob("__init__.py")]
    folders = {str(file.parent.relative_to(repository)) for file in files}
    folders -= {folder for folder in folders if folder.startswith("mics_strategy/autoload")}
    installed = {folder.replace("/", ".").replace("recipes", "mics_strategy.recipes", 1) for folder in folders}
    assert {*settings["packages"]} == installed | {"mics_strategy_autoload"}


def test_modules_of_recipes_import_one_another_relatively(repository: Path):
    """They have two names: `recipes` in a checkout, `mics_strategy.recipes` where the project is installed."""
    absolute = [
        f"{file.relative_to(repository)}:{node.lineno}"
        for file in (repository / "recipes").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "recipes")
        or (isinstance(node, ast.Import) and any(name.name.split(".")[0] == "recipes" for name in node.names))
    ]
    assert absolute == []


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tracked and new files."""
    if not (repository / ".git").exists():
        pytest.skip("git lists the files, and an sdist has no git")
    folder = tmp_path_factory.mktemp("wheel")
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "mics_strategy", "recipes", "*.*")
    for name in subprocess.run(listed, cwd=repository, capture_output=True, text=True, check=True).stdout.splitlines():
        source, copy = repository / name, folder / "source" / name
        if source.is_file() and not name.startswith(("tests/", "docs/", "benchmarks/")):
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    (folder / "source" / "LICENSE").write_bytes((repository / "LICENSE").read_bytes())
    command = [*BUILD, "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (file,) = folder.glob("*.whl")
    return file


@pytest.mark.slow
def test_the_wheel_has_every_recipe_and_no_package_of_a_common_name(wheel: Path, repository: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert "mics_strategy/py.typed" in names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"mics_strategy", "mics_strategy_autoload"}
    files = (file for pattern in ("*.py", "*.yaml", "*.j2") for file in (repository / "recipes").rglob(pattern))
    expected = {f"mics_strategy/{file.relative_to(repository)}" for file in files}
    assert {name for name in names if name.startswith("mics_strategy/recipes/")} == expected


@pytest.mark.slow
def test_an_installed_wheel_runs_its_recipes(wheel: Path, tmp_path: Path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)  # what pip does with a wheel of pure Python
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    code = (
        f"import sys; sys.path[:0] = [{str(site)!r}]; sys.path += {dependencies!r}\n"
        "import importlib.util, runpy\n"
        "print(importlib.util.find_spec('recipes'))\n"
        "sys.argv[1:] = ['--help']\n"
        "runpy.run_module('mics_strategy.recipes.pretrain', run_name='__main__')"
    )
    command = [sys.executable, "-I", "-S", "-c", code]  # without the editable install of the environment
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    first, rest = result.stdout.split("\n", 1)
    assert first == "None"
    assert "pretrain" in rest
