"""Can the engine still be broken in every way that `tests/mutations.py` knows?"""

from tests.mutation_table import MUTATIONS
from tests.mutations import problems


def test_every_mutation_can_be_made() -> None:
    assert problems() == []


def test_mutations_are_different_and_change_something() -> None:
    assert len(MUTATIONS) >= 40
    assert len({(mutation.old, mutation.new) for mutation in MUTATIONS}) == len(MUTATIONS)
    assert all(mutation.old != mutation.new for mutation in MUTATIONS)
