"""What do all recipe tests share? The folder of the recipes, and a cache of their own."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of this test run, outside the user's cache folder."""
    return tmp_path_factory.mktemp("recipe-cache")
