"""A place in a job for tests that need no processes, and quiet Lightning."""

from pathlib import Path

import pytest

from tests.ranks import RankContext


@pytest.fixture
def one_rank(tmp_path: Path) -> RankContext:
    """The only rank of a job of one; nothing is started."""
    return RankContext(rank=0, world_size=1, ranks_per_node=1, tmp_path=tmp_path)


@pytest.fixture(autouse=True)
def _no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's hints about loggers and workers are warnings, which fail tests."""
    monkeypatch.setenv("POSSIBLE_USER_WARNINGS", "off")
