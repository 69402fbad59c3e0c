"""Fingerprints differ between tensors, in memory that does not grow with them."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mics_strategy.engine.setup import materialize
from mics_strategy.engine.setup.materialize import fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    found = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).mul(3)
    return found > 0 if dtype is torch.bool else found.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fingerprint_changes_with_any_value_and_any_exchange_of_two(dtype: torch.dtype) -> None:
    value = numbers(dtype)
    expected = fingerprint(value.view(100, 100))
    with mock.patch.object(materialize, "_WORDS", 1024):
        assert fingerprint(value) == expected
        for place in (0, 1023, 1024, 9_999):
            changed = value.clone()
            changed[place] = 0 if value[place] else 1
            assert fingerprint(changed) != expected
        one, other = 17, int((value != value[17]).nonzero()[-1])
        swapped = value.clone()
        swapped[[one, other]] = value[[other, one]]
        assert fingerprint(swapped) != expected


def test_nothing_and_one_number() -> None:
    assert fingerprint(torch.empty(0, 3)) == (0, 0)
    assert fingerprint(torch.tensor(1.0)) == (0x3F800000, 0x3F800000)


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that is no view of the one given."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.numel = 0
        self._known = given.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self._known:
                self.numel = max(self.numel, tensor.numel())
        return found


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_memory_does_not_grow_with_the_tensor(dtype: torch.dtype) -> None:
    value = numbers(dtype)
    with mock.patch.object(materialize, "_WORDS", 1024), Largest(value) as largest:
        fingerprint(value)
    assert largest.numel == 1024
