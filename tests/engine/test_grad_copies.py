"""Copies of gradients into the flat buffer: the fused kernel beside one copy for each parameter."""

import pytest
import torch

from mics_strategy.engine.layout import BucketLayout, make_layout
from mics_strategy.engine.lifecycle import GradFlag, GradFlags
from mics_strategy.engine.memory import GradCopies

SHAPES = {
    "even": [(16, 4), (8,), (24, 3, 5)],
    "uneven": [(63, 4), (31,), (15, 5), (127, 2)],
    "empty": [(8, 4), (0, 3), (4,)],
    "one": [(63, 7)],
}


def _layout(name: str, ranks: int) -> BucketLayout:
    return make_layout([(str(i), torch.Size(shape)) for i, shape in enumerate(SHAPES[name])], ranks)


def _grads(layout: BucketLayout, dtype: torch.dtype = torch.float32) -> dict[int, torch.Tensor]:
    return {i: torch.randn(part.shape).to(dtype) for i, part in enumerate(layout.param_slices)}


def _one_by_one(layout: BucketLayout, flat: torch.Tensor, grads: dict[int, torch.Tensor]) -> None:
    for position, grad in grads.items():
        for flat_part, grad_part in layout.copy_pairs(flat, grad, position):
            flat_part.copy_(grad_part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_the_fused_copy_equals_one_copy_for_each_parameter(name: str, ranks: int, dtype: torch.dtype) -> None:
    layout = _layout(name, ranks)
    if any(part.dim not in (0, None) for part in layout.param_slices):
        pytest.fail("the shapes are chosen to be cut along dimension 0")
    grads = _grads(layout, dtype)
    fused, expected = torch.full((layout.full_numel,), torch.nan), torch.zeros(layout.full_numel)
    _one_by_one(layout, expected, grads)
    assert GradCopies(layout).copy_all(fused, grads)
    assert torch.equal(fused, expected), "and the padding is zero"


@pytest.mark.parametrize(
    "reason", ["one is missing", "a transposed one", "another dtype", "another dimension", "a scalar"]
)
def test_what_cannot_be_fused_is_copied_one_by_one(reason: str) -> None:
    shapes = {"another dimension": [(9, 64), (8,)], "a scalar": [(16, 4), ()]}.get(reason, [(16, 4), (8,)])
    layout = make_layout([(str(i), torch.Size(shape)) for i, shape in enumerate(shapes)], 8)
    grads = _grads(layout)
    if reason == "one is missing":
        del grads[1]
    elif reason == "a transposed one":
        grads[0] = torch.randn(4, 16).t()
    elif reason == "another dtype":
        grads[1] = grads[1].double()
    copies, flat, expected = GradCopies(layout), torch.zeros(layout.full_numel), torch.zeros(layout.full_numel)
    assert not copies.copy_all(flat, grads)
    copies.copy(flat, grads, GradFlag.ARRIVED, GradFlags(len(shapes)))
    _one_by_one(layout, expected, grads)
    assert torch.equal(flat, expected)
