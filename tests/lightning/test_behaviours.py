"""Does the list of behaviours name tests that exist, and leave no number out?"""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
LIST = TESTS.parent / "docs" / "lightning-behaviours.md"
NUM_BEHAVIOURS = 79


def test_every_behaviour_has_a_line() -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", LIST.read_text(), re.MULTILINE)]
    assert numbers == list(range(1, NUM_BEHAVIOURS + 1))


def test_the_tests_that_are_named_exist() -> None:
    sources = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", LIST.read_text())
    assert [name for name in named if f"def {name}(" not in sources] == []
