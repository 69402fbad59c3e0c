"""Update localities of optimizers are known by class and options, or declared; all others are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer as po
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torchao.optim import AdamW8bit
from transformers.optimization import Adafactor

from mics_strategy.engine.optimizer.locality import UpdateLocality, locality_by_group
from mics_strategy.errors import ConfigError
from tests.engine.optimizer.not_elementwise import Lamb, Simple

ELEMENT, TENSOR, GLOBAL = UpdateLocality


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((8, 3), (6, 4))]


def locality_of(make: Callable[..., Optimizer], declared: str = "auto", **options: Any) -> UpdateLocality:
    [locality] = locality_by_group(make(parameters(), **options), declared)
    return locality


class AdamWOfMine(AdamW):
    """A subclass may change the update."""


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (AdamW, ELEMENT),
        (AdamW8bit, ELEMENT),
        (po.Adan, ELEMENT),
        (Muon, TENSOR),
        (Adafactor, TENSOR),
        (po.Shampoo, TENSOR),
        (po.Prodigy, GLOBAL),
    ],
)
def test_classes_are_known_by_name(make: Callable[..., Optimizer], expected: UpdateLocality) -> None:
    assert locality_of(make) is expected


@pytest.mark.parametrize("make", [AdamWOfMine, Simple, Lamb])
def test_a_class_that_is_not_known_is_refused(make: Callable[..., Optimizer]) -> None:
    with pytest.raises(
        ConfigError,
        match=f"{make.__name__}` depends.*update_locality='element'.*='tensor'.*_layout='tensors'.*'ddp'",
    ):
        locality_of(make)


@pytest.mark.parametrize(("declared", "expected"), [("element", ELEMENT), ("tensor", TENSOR)])
def test_a_declaration_counts_for_classes_that_are_not_known(declared: str, expected: UpdateLocality) -> None:
    assert locality_of(AdamWOfMine, declared) is expected
    assert locality_of(po.Lion, declared, cautious=True) is expected


@pytest.mark.parametrize(("make", "expected"), [(SGD, ELEMENT), (Muon, TENSOR), (po.Prodigy, GLOBAL)])
@pytest.mark.parametrize("declared", ["element", "tensor"])
def test_a_declaration_changes_no_known_class(
    make: Callable[..., Optimizer], expected: UpdateLocality, declared: str
) -> None:
    assert locality_of(make, declared) is expected


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (po.AdaBelief, {"adanorm": True}),
        (po.Lion, {"cautious": True}),
        (po.Lion, {"use_gc": True}),
        (po.ADOPT, {"stable_adamw": True}),
        (po.Adan, {"max_grad_norm": 1.0}),
        (po.Lamb, {"pre_norm": True}),
    ],
    ids=str,
)
def test_options_that_couple_elements_are_not_known(make: Callable[..., Optimizer], option: dict[str, Any]) -> None:
    [(name, value)] = option.items()
    with pytest.raises(ConfigError, match=f"{make.__name__}` with `{name}={value!r}`"):
        locality_of(make, **option)


def test_options_are_those_of_the_group() -> None:
    one, other = parameters()
    optimizer = po.Lion([{"params": [one], "cautious": True}, {"params": [other]}])
    assert locality_by_group(optimizer, "tensor") == [TENSOR, ELEMENT]


def test_a_group_of_muon_for_adam_is_elementwise() -> None:
    one, other = parameters()
    optimizer = po.Muon([{"params": [one], "use_muon": True}, {"params": [other], "use_muon": False}])
    assert locality_by_group(optimizer, "auto") == [TENSOR, ELEMENT]


class Args:
    """As bitsandbytes keeps its options."""

    def __init__(self, optim_bits: int, block_wise: bool) -> None:
        self.optim_bits, self.block_wise = optim_bits, block_wise


def _init(self: Any, params: Any, lr: float = 0.1, optim_bits: int = 32, block_wise: bool = True) -> None:
    Simple.__init__(self, params, lr)
    self.args = Args(8, block_wise)


def _step(self: Any, closure: Any = None) -> None:
    Simple.step(self, closure)


def test_options_kept_in_one_object_are_read() -> None:
    _step.__module__ = "bitsandbytes.optim.optimizer"
    members = {"__init__": _init, "step": _step, "__module__": "bitsandbytes.optim.adamw"}
    cls = type("AdamW8bit", (Simple,), members)
    assert locality_of(cls) is ELEMENT
    with pytest.raises(ConfigError, match="AdamW8bit` with `block_wise=False`"):
        locality_of(cls, block_wise=False)
