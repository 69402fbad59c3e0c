"""Gradients that arrive on several compute streams are read behind all of them."""

from collections.abc import Iterator

import pytest
import torch

from mics_strategy.engine.backward_grads import BackwardGrads
from mics_strategy.engine.lifecycle import GradFlags
from mics_strategy.engine.streams import current_stream
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.pretence import pretended_cuda


@pytest.fixture
def machine() -> Iterator[Machine]:
    with pretended_cuda(), Machine() as made:
        yield made


@pytest.mark.parametrize("joins", [False, True])
def test_gradients_of_another_compute_stream_are_read_behind_it(machine: Machine, joins: bool) -> None:
    collected = BackwardGrads("unit", GradFlags(2), None)
    here = current_stream(torch.device("cuda", 0))
    for position, stream in enumerate((here, torch.cuda.Stream())):
        with torch.cuda.stream(stream):
            collected.follow(current_stream(torch.device("cuda", 0)))
            collected.kept[position] = torch.ones(4, device="cuda")
    if joins:
        collected.join_streams()
    first, second = (collected.kept[position] + 1 for position in range(2))
    assert first.is_cuda
    assert second.is_cuda
    assert bool(machine.races) is not joins
