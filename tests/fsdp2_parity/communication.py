"""FSDP2's scenarios of communication and memory: how often what is sent, and how much a rank holds."""

from collections import Counter

import torch
from torch import nn

from mics_strategy import Sharded, shard
from tests.fsdp2_parity import models
from tests.fsdp2_parity.models import MLP
from tests.fsdp2_parity.runner import PLACEMENTS
from tests.rank_report import RankContext

BLOCKS = 4


def steps(placement: str, *, micro_steps: int = 1, forwards: int = 1, num: int = 2) -> tuple[nn.Module, Sharded]:
    """Some steps of a model whose blocks are units and whose root has no parameters."""
    model = models.mlps(count=BLOCKS)
    handle = shard(model, PLACEMENTS[placement], units=[MLP])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num):
        for _ in range(micro_steps):
            sum(model(torch.ones(2, 6)).sum() for _ in range(forwards)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, handle


def counts(handle: Sharded) -> Counter[str]:
    """Collectives of the last step that were issued, and are those of the plan."""
    found: Counter[str] = Counter()
    for row in handle.traffic():
        assert (row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes), row
        found[row.collective] += row.count
    return found


def resharded(ctx: RankContext) -> None:
    """Forward and backward gather every unit, but for the last two, which are in the two slots still."""
    _, handle = steps("reshard")
    found = counts(handle)
    assert found["all_gather"] == 2 * BLOCKS - 2
    assert found["reduce_scatter"] == BLOCKS


def kept(ctx: RankContext) -> None:
    """Each unit is gathered once for a forward and its backward."""
    found = counts(steps("keep")[1])
    assert found["all_gather"] == BLOCKS
    assert found["reduce_scatter"] == BLOCKS


def accumulated(ctx: RankContext) -> None:
    """Gradients leave their node once per optimizer step, and parameters that stay whole are gathered once."""
    one, three = (steps("hybrid", micro_steps=num)[1] for num in (1, 3))
    assert counts(one)["reduce_scatter"] == BLOCKS
    assert counts(three)["reduce_scatter"] == 3 * BLOCKS
    between = [[row for row in handle.traffic() if row.axis == "inter_node"] for handle in (one, three)]
    assert between[0] == between[1] != []
    gathers = [counts(steps("keep", micro_steps=num)[1])["all_gather"] for num in (1, 3)]
    assert gathers[0] == gathers[1]


def evaluated(ctx: RankContext) -> None:
    """A forward without gradients gathers, and reduces nothing."""
    model, handle = steps("reshard")
    before = counts(handle)
    with torch.no_grad():
        model(torch.ones(2, 6))
    assert counts(handle) == before


def alone(ctx: RankContext) -> None:
    found = counts(steps("reshard")[1])
    assert not found.total()


def memory(ctx: RankContext) -> None:
    """A rank holds its part of the model and a few units, and no step adds to it."""
    model, handle = steps("reshard", num=1)
    held = dict(handle.memory.bytes_by_purpose)
    unit = sum(p.numel() for p in model[0].parameters()) * 4
    assert held["master shards"] <= BLOCKS * unit / ctx.world_size + 64 * BLOCKS * len([*model[0].parameters()])
    assert held["slots"] <= 2 * unit + 1024  # the unit in use, and the next one
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dict(handle.memory.bytes_by_purpose) == held


FACTS = {
    "resharded units are gathered twice": (2, resharded),
    "units that stay whole are gathered once": (2, kept),
    "micro-steps": (4, accumulated),
    "evaluation reduces nothing": (2, evaluated),
    "one rank sends nothing": (1, alone),
    "memory": (2, memory),
}
