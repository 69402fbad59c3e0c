"""Does an `Accelerator` with MiCS train what plain data parallel training trains?"""

from typing import Any

import pytest
import torch
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
    return {"losses": losses, "norms": norms, "lr": schedule.get_last_lr(), "values": values(model)}


ORDERS = ["together", "model last", "optimizer first", "optimizer built later"]


@pytest.mark.parametrize("order", ORDERS)
def test_training_equals_ddp_in_every_order_of_preparing(ranks: RankPool, order: str) -> None:
    expected = run(ranks, 4, trained, PLAIN, "together", {}, ranks_per_node=2)
    found = run(ranks, 4, trained, "mics", order, {}, ranks_per_node=2)
    for own, plain in zip(found, expected, strict=True):
        assert_same(own["values"], plain["values"])
        assert own["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert own["norms"] == pytest.approx(plain["norms"], rel=1e-5)
        assert own["lr"] == plain["lr"]
