"""Does the list of behaviours name tests that exist, and leave no number out?"""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
LIST = (TESTS.parent / "docs" / "accelerate-behaviours.md").read_text()
NUM_BEHAVIOURS = 62


def test_every_behaviour_has_a_line() -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", LIST, re.MULTILINE)]
    assert numbers == list(range(1, NUM_BEHAVIOURS + 1))


def test_what_is_named_exists() -> None:
    sources = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", LIST)
    assert [name for name in named if f"def {name}(" not in sources] == []
    files = re.findall(r"`(tests/[\w/]+\.py)`", LIST)
    assert [name for name in files if not (TESTS.parent / name).is_file()] == []
