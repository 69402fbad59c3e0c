"""Does an `Accelerator` with MiCS train what plain data parallel training trains?"""

import functools
from typing import Any

import pytest
import torch
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerate.runs import PLAIN, accelerator, assert_same, run, values
from tests.models import Transformer
from tests.ranks import RankContext, RankPool


def loader(num: int = 44) -> DataLoader:
    """Sequences of tokens."""
    tokens = torch.randint(0, 11, (num, 6), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens), batch_size=2)


def transformer() -> Transformer:
    torch.manual_seed(1)
    return Transformer()


def adamw(model: Any) -> AdamW:
    """An `eps` above rounding: the gradient of a key's bias is nothing else."""
    return AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def prepared(acc: Any, order: str) -> tuple[Any, ...]:
    """Model, optimizer, data and schedule, prepared in one of the ways in which users write it."""
    model, data = transformer(), loader()
    optimizer = adamw(model)
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    if order == "together":
        return acc.prepare(model, optimizer, data, schedule)
    if order == "model last":
        schedule, data, optimizer, model = acc.prepare(schedule, data, optimizer, model)
    elif order == "optimizer first":
        optimizer = acc.prepare(optimizer)
        model, data, schedule = acc.prepare(model), acc.prepare(data), acc.prepare(schedule)
    elif order == "optimizer built later":
        model, data = acc.prepare(model, data)
        optimizer = adamw(model)
        optimizer, schedule = acc.prepare(optimizer, LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))
    return model, optimizer, data, schedule


def trained(ctx: RankContext, config: str, order: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two epochs of windows of two micro-steps and an odd one, clipped."""
    acc = accelerator(config, **{"accelerator_gradient_accumulation_steps": 2, **options})
    model, optimizer, data, schedule = prepared(acc, order)
    losses, norms = [], []
    for _ in range(2):
        for (tokens,) in data:
            with acc.accumulate(model):
                loss = loss_of(model, tokens)
                acc.backward(loss)
                if acc.sync_gradients:
                    norm = acc.clip_grad_norm_(model.parameters(), 0.3)
                    assert type(norm) is Tensor
                    norms.append(norm.item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    if config != PLAIN:
        assert all(row.planned_bytes == row.sent_bytes for row in acc.sharded_of(model).traffic())
    found = {"losses": losses, "norms": norms, "lr": schedule.get_last_lr(), "values": values(model)}
    return found if config == PLAIN else {**found, "micro_steps": acc.sharded_of(model).config.micro_steps}


@functools.cache
def trained_by_ddp(ranks: RankPool, world_size: int, ranks_per_node: int) -> list[dict[str, Any]]:
    """What every rank has after training without the plugin."""
    return run(ranks, world_size, trained, PLAIN, "together", {}, ranks_per_node=ranks_per_node)


ORDERS = ["together", "model last", "optimizer first", "optimizer built later"]


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("order", ORDERS)
def test_training_equals_ddp_in_every_order_of_preparing(ranks: RankPool, order: str) -> None:
    expected = trained_by_ddp(ranks, 4, 2)
    found = run(ranks, 4, trained, "mics", order, {}, ranks_per_node=2)
    for own, plain in zip(found, expected, strict=True):
        assert_same(own["values"], plain["values"])
        assert own["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert own["norms"] == pytest.approx(plain["norms"], rel=1e-5)
        assert own["lr"] == plain["lr"]


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("config", ["ddp", "zero1", "zero2", "zero3", "zeropp-hpz", "paro-nig"])
def test_every_preset_equals_ddp(ranks: RankPool, config: str) -> None:
    expected = trained_by_ddp(ranks, 4, 2)[0]
    found = run(ranks, 4, trained, config, "together", {}, ranks_per_node=2)[0]
    assert_same(found["values"], expected["values"])
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)


def test_scopes_are_chosen_for_the_accumulation_of_the_accelerator(ranks: RankPool) -> None:
    expected = trained_by_ddp(ranks, 4, 2)[0]
    found = run(ranks, 4, trained, "auto", "together", {}, ranks_per_node=2)[0]
    assert_same(found["values"], expected["values"])
    assert found["micro_steps"] == 2
    assert run(ranks, 2, trained, "auto", "together", {"micro_steps": 7})[0]["micro_steps"] == 7


@pytest.mark.wide(every=2)
@pytest.mark.parametrize(("world_size", "partition_size"), [(2, 1), (3, 3), (4, 1), (4, 4)])
def test_partitions_of_one_rank_and_of_all_equal_ddp(ranks: RankPool, world_size: int, partition_size: int) -> None:
    expected = trained_by_ddp(ranks, world_size, world_size)[0]
    options = {"partition_size": partition_size}
    assert_same(run(ranks, world_size, trained, "mics", "together", options)[0]["values"], expected["values"])


def signalled(ctx: RankContext, config: str, plugin: dict[str, Any]) -> dict[str, Any]:
    """One epoch of `accumulate` as the gradient accumulation plugin says."""
    gradient_plugin = GradientAccumulationPlugin(num_steps=3, **plugin)
    acc = accelerator(config, accelerator_gradient_accumulation_plugin=gradient_plugin)
    model, optimizer, data, _ = prepared(acc, "together")
    hops = []
    for _ in range(2):
        for (tokens,) in data:
            with acc.accumulate(model):
                acc.backward(loss_of(model, tokens))
                optimizer.step()
                optimizer.zero_grad()
            hops.append(acc.sync_gradients)
    found = {"values": values(model), "hops": hops}
    return found if config == PLAIN else {**found, "traffic": acc.sharded_of(model).traffic()}


@pytest.mark.wide(every=2)
@pytest.mark.parametrize(
    "plugin",
    [{}, {"sync_each_batch": True}, {"sync_with_dataloader": False}],
    ids=["usual", "each batch", "over epochs"],
)
def test_accumulation_plugin_means_what_it_means_with_ddp(ranks: RankPool, plugin: dict[str, Any]) -> None:
    expected = run(ranks, 4, signalled, PLAIN, plugin, ranks_per_node=2)[0]
    found = run(ranks, 4, signalled, "mics", plugin, ranks_per_node=2)[0]
    assert found["hops"] == expected["hops"]
    assert False in found["hops"]
    assert_same(found["values"], expected["values"])


def test_nodes_meet_once_per_step_unless_each_batch_is_synchronized(ranks: RankPool) -> None:
    sent_bytes = []
    for each_batch in (False, True):
        options = {"sync_each_batch": each_batch, "sync_with_dataloader": False}
        found = run(ranks, 4, signalled, "mics", options, ranks_per_node=2)[0]
        (between,) = [row for row in found["traffic"] if row.axis == "inter_node" and row.planned_bytes > 100]
        assert between.sent_bytes == between.planned_bytes
        sent_bytes.append(between.sent_bytes)
    assert sent_bytes[1] == 3 * sent_bytes[0]


def by_hand(ctx: RankContext, config: str, form: str) -> dict[str, Tensor]:
    """Windows that the script ends itself."""
    acc = accelerator(config)
    model, optimizer, data, _ = prepared(acc, "together")
    batches = [tokens for (tokens,) in data]
    for one, other in zip(batches[::2], batches[1::2], strict=False):
        if form == "several forwards":
            with acc.no_sync(model):
                first = loss_of(model, one)
            second = loss_of(model, other)
            acc.backward(first + second)
        elif form == "ends inside":
            with acc.no_sync(model):
                acc.backward(loss_of(model, one))
                if config != PLAIN:
                    acc.backward(loss_of(model, other))
            if config == PLAIN:
                acc.backward(loss_of(model, other))
        elif form == "plain backward":
            loss_of(model, one).backward()
            loss_of(model, other).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("form", ["several forwards", "ends inside", "plain backward"])
def test_a_loop_written_by_hand_trains_what_ddp_trains(ranks: RankPool, form: str) -> None:
    expected = run(ranks, 4, by_hand, PLAIN, form, ranks_per_node=2)[0]
    for found in run(ranks, 4, by_hand, "mics", form, ranks_per_node=2):
        assert_same(found, expected)
