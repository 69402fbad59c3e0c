"""Every whole tensor has one owner, and owned bytes are balanced."""

import random

import pytest
import torch

from mics_strategy.engine.layout import OwnerAssignment, assign_owners, make_layout


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_no_rank_has_more_than_the_mean_and_one_tensor(ranks: int, seed: int) -> None:
    sizes = [random.Random(seed).choice((4, 64, 4096, 16384)) for _ in range(5 * ranks)]
    loads = [0] * ranks
    owners = assign_owners(sizes, loads)
    assert loads == [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(ranks)]
    assert max(loads) <= sum(sizes) / ranks + max(sizes)


def test_equal_tensors_are_assigned_evenly() -> None:
    assert sorted(assign_owners([8] * 12, [0] * 4)) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_the_largest_come_first() -> None:
    assert assign_owners([1, 1, 1, 9, 3], [0, 0]) == [1, 1, 1, 0, 1]


def test_earlier_assignments_count() -> None:
    loads = [0, 0]
    assert assign_owners([10], loads) == [0]
    assert assign_owners([4, 4], loads) == [1, 1]
    assert loads == [10, 8]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_element_is_sent_once(ranks: int) -> None:
    """Scalars, that every rank has, once from each."""
    shapes = [(7, 3), (), (2,), (1, 9), (16, 4), (0, 3)]
    param_slices = make_layout([(str(i), torch.Size(shape)) for i, shape in enumerate(shapes)], ranks).param_slices
    owners = assign_owners([param_slice.numel for param_slice in param_slices], [0] * ranks)
    found = OwnerAssignment(param_slices=param_slices, owners=tuple(owners), ranks=ranks)
    rows, wholes = zip(*((found.rows_numels(i), found.whole_numels(i)) for i in range(ranks)), strict=True)
    assert [list(column) for column in zip(*rows, strict=True)] == [*wholes]
    assert sum(map(sum, rows)) == 21 + ranks + 2 + 9 + 64
