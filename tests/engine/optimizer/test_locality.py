"""Dry runs determine the update locality of an optimizer."""

import copy
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mics_strategy.engine.optimizer.locality import UpdateLocality, locality_by_group
from tests.engine.optimizer.not_elementwise import ByRow, Clipping, CountingAll, Lamb, Late, Simple
from tests.engine.training import OPTIMIZERS

CPU = torch.device("cpu")


class ByFlag(Simple):
    """One way or the other, as the group says."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * p.norm() if group["is_whole"] else p.grad


class Wrapper(Optimizer):
    """Shares groups and states of another optimizer, and steps it."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.base.step()


class Stubborn(Simple):
    """Cannot be copied."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.thing = (each for each in ())


steps_seen = 0
shapes_seen: list[int] = []


def note(tensor: Tensor) -> None:
    """What an author writes to find out what his optimizer does."""
    global steps_seen
    steps_seen += 1
    shapes_seen.append(tensor.dim())


def counting(kinds: list[type[Optimizer]]) -> type[Optimizer]:
    calls = 0

    class Counting(Simple):
        """Counts in its class, in its instance, in its module and around itself."""

        of_class = 0
        seen: dict[str, int] = {}  # noqa: RUF012

        def __init__(self, params: Iterable[Any]) -> None:
            super().__init__(params)
            self.of_instance = 0

        def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
            nonlocal calls
            note(p)
            calls += 1
            Counting.of_class += 1
            type(self).of_class += 1
            self.seen["steps"] = self.seen.get("steps", 0) + 1
            self.of_instance += 1
            return super().change(p, group) * p.norm()

        @staticmethod
        def calls() -> int:
            return calls

    kinds.append(Counting)
    return Counting


def test_a_dry_run_does_not_change_the_authors_counters(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mics_strategy")
    made: list[Any] = []
    optimizer = counting(made)(parameters())
    assert locality_by_group(optimizer, CPU) == [UpdateLocality.PER_TENSOR]
    (kind,) = made
    assert (kind.calls(), kind.of_class, kind.seen, steps_seen, shapes_seen) == (0, 0, {}, 0, [])
    assert vars(optimizer)["of_instance"] == 0
    assert "Counting is not known. A dry run on small tensors" in caplog.text
    assert "the class itself" not in caplog.text


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((8, 3), (5,), (), (6, 4), (2, 3, 3, 3))]


def locality_of(make: Callable[[list[nn.Parameter]], Optimizer]) -> list[UpdateLocality]:
    return locality_by_group(make(parameters()), CPU)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch_are_elementwise(name: str) -> None:
    """Tried as a class that is not torch's own."""
    make: Any = OPTIMIZERS[name]
    cls = type("Other", (make.func,), {})
    assert locality_of(lambda params: cls(params, **make.keywords)) == [UpdateLocality.ELEMENTWISE]


@pytest.mark.parametrize("cls", [Lamb, ByRow, Late, torch.optim.Adafactor])
def test_dry_run_finds_per_tensor_updates(cls: type[Optimizer]) -> None:
    assert locality_of(cls) == [UpdateLocality.PER_TENSOR]


def test_row_local_updates_are_not_elementwise() -> None:
    """Tensors may be cut along another dimension than the first."""
    assert locality_of(lambda params: ByRow([p for p in params if p.dim() == 2])) == [UpdateLocality.PER_TENSOR]


@pytest.mark.parametrize("cls", [Clipping, CountingAll])
def test_dry_run_finds_global_updates(cls: type[Optimizer]) -> None:
    assert locality_of(cls) == [UpdateLocality.GLOBAL]


def test_muon_needs_whole_tensors() -> None:
    assert locality_of(lambda params: torch.optim.Muon([p for p in params if p.dim() == 2])) == [
        UpdateLocality.PER_TENSOR
    ]


def test_a_known_name_decides_where_a_dry_run_is_too_short() -> None:
    assert locality_of(type("DistributedShampoo", (Simple,), {})) == [UpdateLocality.PER_TENSOR]


def test_every_group_has_its_own_locality() -> None:
    def make(params: list[nn.Parameter]) -> Optimizer:
        groups = [{"params": params[:2], "is_whole": True}, {"params": params[2:], "is_whole": False}]
        return ByFlag(groups)

    assert locality_of(make) == [UpdateLocality.PER_TENSOR, UpdateLocality.ELEMENTWISE]


def test_a_learning_rate_of_zero_does_not_hide_locality() -> None:
    assert locality_of(partial(Lamb, lr=0.0)) == [UpdateLocality.PER_TENSOR]


@pytest.mark.parametrize(
    ("base", "expected"),
    [(SGD, UpdateLocality.ELEMENTWISE), (Lamb, UpdateLocality.PER_TENSOR), (Clipping, UpdateLocality.GLOBAL)],
)
def test_a_wrapper_has_the_locality_of_the_wrapped_optimizer(base: type[Optimizer], expected: UpdateLocality) -> None:
    assert locality_of(lambda params: Wrapper(base(params, lr=0.1))) == [expected]


@pytest.mark.parametrize(
    "make", [lambda params: type("Other", (AdamW,), {})(params), Lamb, lambda params: Wrapper(SGD(params, lr=0.1))]
)
def test_a_dry_run_changes_nothing(make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    params = parameters()
    optimizer = make(params)
    LambdaLR(optimizer, lambda step: 0.5)  # replaces `step` of the object
    for p in params:
        p.grad = torch.ones_like(p)
    before, random_state = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    locality_by_group(optimizer, CPU)
    assert calls == []
    assert optimizer.state_dict() == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(p, torch.ones_like(p)) and torch.equal(p.grad, torch.ones_like(p)) for p in params)


def test_a_failed_dry_run_warns_with_the_assumed_locality(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert locality_of(Stubborn) == [UpdateLocality.ELEMENTWISE]
    assert "The dry run of Stubborn on small tensors failed" in caplog.text
