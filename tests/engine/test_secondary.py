"""Secondary parameters: same training, and the traffic for which they exist."""

import time
from collections import Counter

import pytest
import torch
from torch import nn

from mics_strategy import ShardConfig, shard
from mics_strategy.comm.work import has_pending_work
from mics_strategy.engine.plan import Plan
from tests import models
from tests.engine.counting import CountC10d, planned_kinds
from tests.engine.training import Run, assert_same_training, plain, start, train, unused_alike
from tests.ranks import RankContext, RankPool

pytestmark = [pytest.mark.wide, pytest.mark.one_job]

CHAINS = [  # params, secondary, grads, optimizer: of 4 ranks, 2 to a node
    (4, 2, 4, 4),
    (4, 1, 4, 4),
    (2, 1, 2, 2),
    (2, 1, 1, 4),
    (4, 2, 1, 4),
    (4, 2, 2, 4),
    (2, 1, 4, 4),
]
chains = pytest.mark.parametrize("chain", CHAINS, ids=str)


def _config(chain: tuple[int, int, int, int], **options: object) -> ShardConfig:
    params, secondary, grads, optimizer = chain
    scopes = {"params": params, "secondary_params": secondary, "grads": grads, "optimizer": optimizer}
    return ShardConfig(**scopes, **options)


@chains
@pytest.mark.parametrize("case", [models.transformer, models.tied, models.scalar, models.shared, unused_alike])
def test_trains_as_plain(ranks: RankPool, chain: tuple[int, int, int, int], case: object) -> None:
    run = Run(case=case, config=_config(chain), accumulation=2)
    assert_same_training(ranks(4, train, run, ranks_per_node=2), plain(run, 4))


@pytest.mark.parametrize("overlap", ["all", "none", {"gather"}], ids=str)
@pytest.mark.parametrize("prefetch", [1, 3])
def test_trains_as_plain_with_any_timing(ranks: RankPool, overlap: object, prefetch: int) -> None:
    run = Run(case=models.transformer, config=_config((4, 2, 4, 4), overlap=overlap, prefetch=prefetch), clip=0.1)
    assert_same_training(ranks(4, train, run, ranks_per_node=2), plain(run, 4))


class Interrupted(Exception):
    """Raised inside a forward."""


class Reversed(nn.Module):
    """Runs its blocks last to first, so that a block keeps its staging buffer for long; may raise before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(3))
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.raises:
            raise Interrupted
        for block in reversed(self.blocks):
            x = torch.tanh(block(x, x))
        return x


def outputs_of_interrupted_steps(model: Reversed) -> list[torch.Tensor]:
    """Step on gradients that were read before a write and before a forward that raises after its prefetch."""
    x, optimizer = torch.ones(2, 4, dtype=torch.float64), torch.optim.SGD(model.parameters(), lr=0.5)
    outputs = []
    for _ in range(3):
        model(x).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        model.raises = True
        with pytest.raises(Interrupted):
            model(x)
        model.raises = False
        while has_pending_work():  # the prefetched values have arrived, and nothing has waited for them
            time.sleep(0.001)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            outputs.append(model(x))
    return outputs


def reversed_model() -> Reversed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Reversed().double()


def interrupted(ctx: RankContext, preset: str, overlap: object) -> list[torch.Tensor]:
    model = reversed_model()
    shard(model, ShardConfig.preset(preset, prefetch=3, overlap=overlap), units=[nn.Bilinear])
    return outputs_of_interrupted_steps(model)


@pytest.mark.parametrize("overlap", ["all", {"gather", "reduce", "second_hop"}], ids=["all", "without-update"])
@pytest.mark.parametrize("preset", ["zeropp-hpz", "zero1", "paro-nig", "mics"])
def test_a_gather_that_an_update_overtakes_leaves_no_former_values(
    ranks: RankPool, preset: str, overlap: object
) -> None:
    expected = outputs_of_interrupted_steps(reversed_model())
    for outputs in ranks(4, interrupted, preset, overlap, ranks_per_node=2):
        torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)


def count_steps(ctx: RankContext, run: Run) -> tuple[object, object, Plan]:
    training = start(ctx, run)
    training.step(0)
    with CountC10d() as counted:
        training.step(1)
    return counted.kinds, planned_kinds(training.sharded.plan), training.sharded.plan


@chains
@pytest.mark.parametrize("accumulation", [1, 3])
def test_sends_what_was_planned(ranks: RankPool, chain: tuple[int, int, int, int], accumulation: int) -> None:
    run = Run(case=models.transformer, config=_config(chain), accumulation=accumulation)
    for issued, planned, _ in ranks(4, count_steps, run, ranks_per_node=2):
        assert issued == planned


def _gathered(plan: Plan, phase: str) -> set[str]:
    return {p.axis for p in plan.collectives if p.collective == "all_gather" and p.phase == phase}


def test_backward_stays_in_the_node(ranks: RankPool) -> None:
    run = Run(case=models.transformer, config=ShardConfig.preset("zeropp-hpz"))
    _, _, plan = ranks(4, count_steps, run, ranks_per_node=2)[0]
    assert _gathered(plan, "forward") == {"intra_node", "inter_node"}
    assert _gathered(plan, "backward") == {"intra_node"}


def test_later_micro_steps_stay_in_the_node(ranks: RankPool) -> None:
    runs = [
        Run(case=models.transformer, config=ShardConfig.preset("zeropp-hpz"), accumulation=count) for count in (1, 3)
    ]
    counts = []
    for run in runs:
        _, _, plan = ranks(4, count_steps, run, ranks_per_node=2)[0]
        gathers = [planned for planned in plan.collectives if planned.collective == "all_gather"]
        counts.append(Counter(planned.axis for planned in gathers))
    assert counts[0]["inter_node"] == counts[1]["inter_node"]
    assert counts[0]["intra_node"] < counts[1]["intra_node"]


def test_unsharded_secondary_copy_sends_nothing_in_the_backward(ranks: RankPool) -> None:
    _, _, plan = ranks(4, count_steps, Run(case=models.transformer, config=_config((4, 1, 4, 4))), ranks_per_node=2)[0]
    assert _gathered(plan, "forward")
    assert not _gathered(plan, "backward")


def memory(ctx: RankContext, run: Run) -> dict[str, int]:
    return dict(start(ctx, run).sharded.memory.bytes_by_purpose)


@pytest.mark.parametrize("chain", CHAINS[:3], ids=str)
def test_copy_takes_its_share_and_no_more(ranks: RankPool, chain: tuple[int, int, int, int]) -> None:
    run = Run(case=models.transformer, config=_config(chain))
    bytes_ = ranks(4, memory, run, ranks_per_node=2)[0]
    assert bytes_["secondary shards"] * chain[1] == bytes_["master shards"] * chain[3]


def test_on_one_node_there_is_no_copy(ranks: RankPool) -> None:
    run = Run(case=models.transformer, config=ShardConfig.preset("zeropp-hpz"))
    zero3 = run.replace(config=ShardConfig.preset("zero3"))
    assert ranks(2, memory, run) == ranks(2, memory, zero3)
    assert ranks(2, count_steps, run)[0][2] == ranks(2, count_steps, zero3)[0][2]
