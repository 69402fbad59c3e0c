"""A closed storage refuses every access of torch to its data, and no other storage does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mics_strategy.engine.storage_guard import StorageGuard, explain_refusal

ACCESSES: dict[str, Callable[[Tensor], object]] = {
    "matmul": lambda t: t @ t,
    "add": lambda t: torch.ones(4, 4) + t,
    "copy": lambda t: torch.empty(4, 4).copy_(t),
    "write": lambda t: t.fill_(1),
    "item": lambda t: t[1, 2].item(),
    "clone of a view": lambda t: t.t()[1:].clone(),
    "alias": lambda t: t.detach().sum(),
    "foreach": lambda t: torch._foreach_add([t], 1),
    "embedding": lambda t: torch.nn.functional.embedding(torch.tensor([1]), t),
    "cat": lambda t: torch.cat([t, t]),
    "tolist": lambda t: t.tolist(),
    "address": lambda t: t.data_ptr(),
    "NumPy": lambda t: t.numpy(),
}


@pytest.mark.parametrize("access", ACCESSES)
def test_an_access_is_refused_while_closed(access: str) -> None:
    memory = torch.ones(32)[8:24]
    guard = StorageGuard([memory])
    tensor = guard.tensors[0].view(4, 4)
    guard.close()
    with pytest.raises(RuntimeError) as refused:
        ACCESSES[access](tensor)
    assert "was read while its unit was not unsharded" in (explain_refusal(refused.value) or "")
    ACCESSES[access](memory.view(4, 4))
    guard.open()
    ACCESSES[access](tensor)


def test_tensors_may_be_made_while_closed() -> None:
    memory = torch.arange(6.0)
    guard = StorageGuard([memory])
    guard.close()
    made = [guard.tensors[0].view(2, 3), guard.tensors[0].detach(), guard.tensors[0][1:], guard.tensors[0].data]
    memory += 1
    guard.open()
    assert [each.flatten()[0].item() for each in made] == [1, 1, 2, 1]


def test_only_its_own_tensors_are_guarded() -> None:
    memory = torch.zeros(4)
    one, other = StorageGuard([memory]), StorageGuard([memory])
    assert one.guards(one.tensors[0][1:].view(3, 1))
    assert not one.guards(other.tensors[0])
    assert not one.guards(memory)
    one.close()
    assert other.tensors[0].sum() == 0
    assert explain_refusal(RuntimeError("another error")) is None


def test_memory_lives_as_long_as_its_tensors() -> None:
    memory = torch.full((1 << 20,), 7.0)
    kept = StorageGuard([memory]).tensors[0][-1:]
    del memory
    others = [torch.zeros(1 << 20) for _ in range(4)]  # would take the memory
    assert kept.item() == 7
    assert len(others) == 4
