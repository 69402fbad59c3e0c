"""Does the command print what was found on slow links, and leave nothing?"""

from pathlib import Path

import pytest

from benchmarks import calibrate
from tests.benchmarks.needs import needs_testbed


@pytest.mark.slow
@needs_testbed
def test_rank_0_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibrate.main(["--rate-mbit", "50", "--nodes", "2", "--ranks-per-node", "2"]) == 0
    said = capsys.readouterr().out
    assert "all-gathers over intra_node+inter_node of" in said
    assert said.count("measured now") == 2
    assert [*tmp_path.iterdir()] == []


def test_nodes_that_cannot_be_made_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate.main(["--nodes", "0"]) == 2
    assert "TestbedError" in capsys.readouterr().err
