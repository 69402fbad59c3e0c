"""Are versions and missing packages told as the installed distribution has them?"""

import importlib.metadata
import re
from pathlib import Path

import pytest

from mics_strategy.version import check_torch, install_advice, package_version

ROOT = Path(__file__).parents[1]
REQUIREMENTS = [
    *("torch<2.16,>=2.11", "safetensors>=0.5", 'accelerate<2,>=1.14; extra == "accelerate"'),
    *('mics_strategy[accelerate]; extra == "recipes"', 'jinja2>=3.1; extra == "recipes"'),
    'PyYAML>=6; sys_platform == "linux" and extra == "recipes"',
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed distributions and their versions."""
    versions = {"mics_strategy": "0.3.0", "PyYAML": "6.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", {"mics_strategy": REQUIREMENTS}.__getitem__)
    check_torch.cache_clear()
    return versions


def test_an_old_torch_is_refused(installed: dict[str, str]) -> None:
    words = "mics_strategy 0.3.0 needs torch<2.16,>=2.11, and torch 2.9.1 is installed. Run `pip install 'torch<2.16,"
    with pytest.raises(ImportError, match=re.escape(words)):
        check_torch("2.9.1")


@pytest.mark.parametrize("version", ["2.16.0a0+git1234", "3.0"])
def test_a_torch_that_nobody_has_tried_is_told(installed: dict[str, str], version: str) -> None:
    with pytest.warns(UserWarning, match=f"and torch {re.escape(version)} is installed. It may work"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.0+cu132"])
def test_others_are_taken_in_silence(installed: dict[str, str], version: str) -> None:
    check_torch(version)


def test_in_a_checkout_nothing_is_known_of_versions(installed: dict[str, str]) -> None:
    del installed["mics_strategy"]
    assert package_version() == "unknown"
    check_torch("1.0")
    assert install_advice("recipes") == "Run `pip install -c constraints.txt '.[recipes]'` in a checkout."


def test_what_an_extra_lacks_is_named(installed: dict[str, str]) -> None:
    missing = "Run `pip install 'jinja2>=3.1' 'accelerate<2,>=1.14'` (in a checkout, with `-c constraints.txt`)."
    assert install_advice("recipes") == missing
    installed |= {"jinja2": "3.1", "accelerate": "1.14"}
    assert install_advice("recipes") == "Run `pip install -c constraints.txt '.[recipes]'` in a checkout."


def test_nobody_is_told_to_install_a_name_that_is_not_registered() -> None:
    folders = (ROOT / name for name in ("mics_strategy", "recipes", "docs", "tests", "benchmarks", ".github"))
    files = [ROOT / "README.md", *(file for folder in folders for file in folder.rglob("*"))]
    texts = {file: file.read_text() for file in files if file.suffix in (".py", ".md", ".j2", ".yaml", ".yml")}
    assert len(texts) > 500
    told = re.compile(r"pip install [^\n`]*mics_" + r"strategy(\[|\b(?!/))")
    assert [str(file) for file, text in texts.items() if told.search(text)] == []
