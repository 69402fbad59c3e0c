"""Adapters of `peft` train on a sharded model as on a plain one.

Most of such a model is frozen, perhaps in a lower precision, and a layer mixes both kinds. `lora_B` is zero at first,
so `lora_A` learns from the second step on.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from mics_strategy import ShardConfig
from mics_strategy.engine.layout import make_layout
from mics_strategy.engine.units import find_units
from tests.engine.adapters import (
    dora,
    ia3,
    lora,
    lora_against_its_base,
    lora_and_a_trained_head,
    lora_and_a_trained_tied_head,
    lora_and_biases,
    lora_on_bfloat16,
    lora_on_everything,
    lora_on_parameters,
    lora_on_tied_embeddings,
    lora_with_recomputation,
    prompt,
    two_adapters_by_micro_step,
    two_adapters_by_step,
)
from tests.engine.counting import CountC10d, Kind, planned_kinds
from tests.engine.training import (
    Outcome,
    Run,
    assert_identical,
    assert_same,
    assert_same_training,
    plain,
    start,
    train_each,
)
from tests.models import Case
from tests.ranks import RankContext, RankPool

STEPS = 4
OTHERS = (
    lora_on_tied_embeddings,
    lora_on_everything,
    lora_on_parameters,
    lora_and_a_trained_head,
    lora_and_a_trained_tied_head,
    lora_and_biases,
    lora_on_bfloat16,
    dora,
    ia3,
    prompt,
)
PRESETS = ("ddp", "zero1", "zero2", "zero3", "mics", "paro-iig", "paro-ini")
OF_FOUR_RANKS = ("ddp", "mics", "paro-ini")
Make = Callable[[], Case]


def _name(case: Make) -> str:
    return case.__name__


def _run(case: Make, preset: str = "mics", **options: Any) -> Run:
    return Run(case=case, config=ShardConfig.preset(preset), **{"steps": STEPS, **options})


def _check(ranks: RankPool, world_size: int, runs: list[Run]) -> None:
    by_rank = ranks(world_size, train_each, runs, ranks_per_node=2)
    for run, outcomes in zip(runs, zip(*by_rank, strict=True), strict=True):
        _assert_as_plain(run, list(outcomes))


def _assert_as_plain(run: Run, outcomes: list[Outcome]) -> None:
    expected = plain(run, len(outcomes))
    assert min(grad.abs().max() for grad in expected.grads[-1].values()) > 1e-4, "too small to be compared"
    assert_same_training(outcomes, expected)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("world_size", "accumulation"), [(4, 2), (2, 1), (4, 1), (2, 2)])
def test_lora_trains_as_plain(ranks: RankPool, world_size: int, accumulation: int, preset: str) -> None:
    _check(ranks, world_size, [_run(lora, preset, accumulation=accumulation)])


@pytest.mark.parametrize("case", OTHERS, ids=_name)
@pytest.mark.parametrize("preset", OF_FOUR_RANKS)
def test_every_adapter_trains_as_plain(ranks: RankPool, preset: str, case: Make) -> None:
    _check(ranks, 4, [_run(case, preset, accumulation=2)])


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("case", OTHERS, ids=_name)
def test_every_adapter_trains_as_plain_on_two_ranks(ranks: RankPool, case: Make) -> None:
    _check(ranks, 2, [_run(case, preset) for preset in ("zero2", "zero3")])


def test_lora_with_recomputation_trains_as_plain(ranks: RankPool) -> None:
    assert lora_with_recomputation().build().get_base_model().model.layers[0].gradient_checkpointing
    runs = [_run(lora_with_recomputation, preset, accumulation=2) for preset in ("ddp", "zero2", "mics", "paro-iig")]
    _check(ranks, 4, runs)
    assert_same(plain(runs[0], 4).parameters, plain(_run(lora, accumulation=2), 4).parameters)


@pytest.mark.parametrize("case", [lora_against_its_base, two_adapters_by_step, two_adapters_by_micro_step], ids=_name)
@pytest.mark.parametrize("preset", ["ddp", "zero1", "mics", "paro-iig"])
def test_adapters_that_are_switched_train_as_plain(ranks: RankPool, preset: str, case: Make) -> None:
    _check(ranks, 4, [_run(case, preset, accumulation=2)])


def train_all_parameters(ctx: RankContext, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str], set[str]]:
    """With an optimizer over frozen parameters too: those before and after.

    Names with a gradient; with a state.
    """
    training = start(ctx, run)
    optimizer = AdamW(training.model.parameters(), lr=0.1, weight_decay=0.1)
    frozen = {name for name, p in training.model.named_parameters() if not p.requires_grad}
    before = training.parameters()
    for step in range(2):
        training.backward(step)
        with_gradient = {name for name, p in training.model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    with_state = {name for name, p in training.model.named_parameters() if p in optimizer.state}
    after = training.parameters()
    return {n: before[n] for n in frozen}, {n: after[n] for n in frozen}, with_gradient, with_state


@pytest.mark.parametrize("case", [lora_and_a_trained_head, lora_on_bfloat16], ids=_name)
@pytest.mark.parametrize("preset", ["zero1", "paro-iig", "paro-ini"])
def test_frozen_parameters_keep_their_bits_and_have_no_gradient_and_no_state(
    ranks: RankPool, case: Make, preset: str
) -> None:
    trainable = {name for name, p in case().build().named_parameters() if p.requires_grad}
    for before, after, with_gradient, with_state in ranks(
        4, train_all_parameters, _run(case, preset, accumulation=2), ranks_per_node=2
    ):
        assert before
        assert before.keys().isdisjoint(trainable)
        assert_identical(after, before)
        assert with_gradient == with_state == trainable


def memory_of(ctx: RankContext, run: Run) -> Counter[str]:
    return Counter(start(ctx, run).sharded.memory.bytes_by_purpose)


def _bytes(case: Make, *, trainable: bool, ranks: int) -> int:
    """Bytes of the buckets of trained or of frozen parameters on all `ranks` ranks."""
    total = 0
    for unit in find_units(case().build(), case().units):
        by_dtype: dict[torch.dtype, list[Any]] = {}
        for entry in unit.parameters:
            if entry.parameter.requires_grad == trainable:
                by_dtype.setdefault(entry.parameter.dtype, []).append((entry.name, entry.parameter.shape))
        total += sum(dtype.itemsize * make_layout(kind, ranks).full_numel for dtype, kind in by_dtype.items())
    return total


@pytest.mark.parametrize("case", [lora_and_a_trained_head, lora_on_bfloat16], ids=_name)
def test_only_trained_parameters_have_gradient_memory(ranks: RankPool, case: Make) -> None:
    for preset, grads, optimizer in (("mics", 2, 2), ("paro-iig", 2, 4), ("paro-ini", 1, 2)):
        purposes = ranks(4, memory_of, _run(case, preset), ranks_per_node=2)[0]
        trained = _bytes(case, trainable=True, ranks=optimizer)
        frozen = _bytes(case, trainable=False, ranks=optimizer)
        assert trained < 0.5 * frozen
        assert purposes["gradients"] == trained // grads
        assert purposes["reduced gradients"] == (trained // optimizer if grads != optimizer else 0)
        assert purposes["cast gradients"] == 0
        assert purposes["master shards"] == trained // optimizer + frozen // optimizer


def count_second_step(ctx: RankContext, runs: list[Run]) -> list[tuple[Counter[Kind], Counter[Kind]]]:
    """Issued and planned collectives."""
    found = []
    for run in runs:
        training = start(ctx, run)
        for step in range(2):
            with CountC10d() as counted:
                training.step(step)
        found.append((counted.kinds, planned_kinds(training.sharded.plan)))
    return found


@pytest.mark.parametrize("case", [lora, lora_and_a_trained_head, lora_on_bfloat16], ids=_name)
def test_adapter_sends_what_was_planned(ranks: RankPool, case: Make) -> None:
    runs = [_run(case, preset, accumulation=2) for preset in ("mics", "paro-iig", "paro-ini")]
    for by_run in ranks(4, count_second_step, runs, ranks_per_node=2):
        for issued, planned in by_run:
            assert issued == planned
            assert planned


def bytes_of_gradients(ctx: RankContext, run: Run) -> int:
    """Sent in fp32 by the groups that carry gradients, in a step."""
    training = start(ctx, run)
    for step in range(2):
        with CountC10d() as counted:
            training.step(step)
    return sum(num_bytes for (dtype, _), num_bytes in counted.carried.items() if dtype is torch.float32)


def test_frozen_parameters_are_never_reduced(ranks: RankPool) -> None:
    """In fp32, gradients of a bfloat16 base would be seen by their size."""
    trained = _bytes(lora_on_bfloat16, trainable=True, ranks=2)
    for sent in ranks(4, bytes_of_gradients, _run(lora_on_bfloat16, "paro-ini"), ranks_per_node=2):
        assert sent == trained // 2 + trained // 2  # half of it inside the node, then twice a quarter between nodes
