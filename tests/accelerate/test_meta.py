"""May a model be built on the meta device, with its optimizer, and get its values when it is prepared and loaded?"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.accelerate.runs import accelerator, assert_same, run, values
from tests.accelerate.test_training import adamw
from tests.lightning.modules import Net, samples
from tests.ranks import RankContext, RankPool


def step(acc: Any, model: Any, optimizer: Any, first: int) -> None:
    """On samples that differ between ranks."""
    pairs = [samples()[first + acc.process_index * 2 + index] for index in range(2)]
    x, y = (torch.stack(each) for each in zip(*pairs, strict=True))
    acc.backward(mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


def trained(ctx: RankContext, folder: str) -> dict[str, Tensor]:
    acc = accelerator("mics")
    model = Net()
    model, optimizer = acc.prepare(model, adamw(model))
    step(acc, model, optimizer, 0)
    acc.save_state(folder)
    step(acc, model, optimizer, 8)
    return values(model)


def from_nothing(ctx: RankContext, folder: str) -> tuple[bool, dict[str, Tensor]]:
    acc = accelerator("mics")
    with torch.device("meta"):
        model = Net()
        optimizer = adamw(model)
    model, optimizer = acc.prepare(model, optimizer)
    has_values = all(parameter.isfinite().all() for parameter in values(model).values())
    step(acc, model, optimizer, 0)  # with values of its own
    acc.load_state(folder)
    step(acc, model, optimizer, 8)
    return has_values, values(model)


def test_a_model_on_meta_goes_on_as_one_that_was_there(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    expected = run(ranks, 4, trained, folder, ranks_per_node=2)[0]
    for has_values, found in run(ranks, 4, from_nothing, folder, ranks_per_node=2):
        assert has_values
        assert_same(found, expected, 0.0)
