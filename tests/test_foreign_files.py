"""A file that somebody else has written or damaged is read or refused: nothing is run, nothing crashes or hangs."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.foreign_files import EDITS, READERS, Edit, Trial


@pytest.mark.parametrize("name", READERS)
def test_an_edited_file_is_read_or_refused_and_runs_nothing(name: str, tmp_path: Path) -> None:
    trial = Trial(READERS[name], tmp_path)

    @settings(max_examples=20, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
    @given(st.sampled_from([*trial.reader.edited]), EDITS)
    def attempt(file: str, edits: list[Edit]) -> None:
        trial.run(file, edits)

    attempt()
