"""What `second_hop="delayed"` does not support is refused by name, on every rank."""

from typing import Any

import pytest
import torch
from torch import nn

from mics_strategy import Codec, ConfigError, LifecycleError, MiCSError, ShardConfig, Topology, finish_delayed, shard
from mics_strategy.planner import Cluster
from mics_strategy.planner.space import scopes_of
from tests.engine.delayed_plain import Loop
from tests.engine.test_delayed import config_of, run_step, start
from tests.outer.plain import Net, batch, loss_of
from tests.ranks import RankContext, RankPool, raises_on_every_rank


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "auto"}, "`params='auto'` chooses scopes"),
        ({"outer_every": 3}, "`outer_every=3` lets nodes step alone"),
        ({"overlap": "none"}, "`overlap` leaves out 'second_hop' or 'update'"),
        ({"overlap": {"gather", "reduce", "second_hop"}}, "`overlap` leaves out"),
        ({"grad_codec": Codec(bits=8, feedback=True)}, "`grad_codec` has feedback"),
    ],
)
def test_a_configuration_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ShardConfig.preset(**{"name": "mics", "second_hop": "delayed", **fields})
    assert words in str(refused.value)
    assert "second_hop='boundary'" in str(refused.value)


def sharded_with(ctx: RankContext, name: str, per_node: int) -> str:
    try:
        config = ShardConfig.preset(name, second_hop="delayed", topology=Topology(ranks_per_node=per_node))
        shard(Net(), config, units=[nn.Linear])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "per_node"), [("zero3", 2), ("zero2", 2), ("zeropp", 2), ("mics", 4)])
def test_a_job_without_a_second_hop_is_refused_on_every_rank(ranks: RankPool, name: str, per_node: int) -> None:
    for message in ranks(4, sharded_with, name, per_node):
        assert "`grads` is sharded over all 4 ranks of this job, so that no second hop follows" in message


def test_the_planner_does_not_price_it() -> None:
    with pytest.raises(ConfigError, match="another algorithm than the synchronous training that the planner predicts"):
        scopes_of(ShardConfig.preset("mics", second_hop="delayed"), Cluster.preset("p4d.24xlarge", nodes=2))


class Lookahead(torch.optim.Optimizer):
    """An optimizer that steps another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def refused_in_training(ctx: RankContext, what: str) -> str:
    """What a rank raises."""
    trained = model, sharded, optimizer, _ = start(config_of("mics"), Loop())
    run_step(ctx, Loop(), trained, 0)
    try:
        loss_of(model, batch(1, 0, ctx.rank), 1).backward()
        if what == "several":
            torch.optim.SGD([model.scale], lr=0.1).step()
        elif what == "reads":
            assert model.scale.grad is not None
            loss_of(model, batch(2, 0, ctx.rank), 1).backward()
        elif what == "finish":
            finish_delayed(sharded)
        elif what == "stepping":
            Lookahead(optimizer).step()
        elif what == "fused":
            optimizer.grad_scale = torch.tensor(2.0)
            optimizer.step()
    except MiCSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("several", "LifecycleError: SGD lacks the trained parameter `first.weight`"),
        ("reads", "LifecycleError: A backward follows final gradients of `"),
        ("finish", "LifecycleError: `finish_delayed()` was called between a backward and its optimizer step"),
        ("stepping", "LifecycleError: Lookahead steps another optimizer"),
        ("fused", "LifecycleError: AdamW unscales gradients in its step"),
    ],
)
def test_a_loop_is_refused_on_every_rank(ranks: RankPool, what: str, words: str) -> None:
    for message in ranks(4, refused_in_training, what):
        assert words in message, message


def test_nothing_is_left_to_finish_with_other_second_hops(ranks: RankPool) -> None:
    assert ranks(4, finished) == [False] * 4


def finished(ctx: RankContext) -> bool:
    trained = start(config_of("mics", second_hop="boundary"), Loop())
    run_step(ctx, Loop(), trained, 0)
    return finish_delayed(trained[1])


class Raising(torch.optim.SGD):
    """Raises in the middle of its second step."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps == 1:
            self.param_groups[0]["params"][0].add_(1.0)
            raise ArithmeticError
        super().step()


def raised(ctx: RankContext) -> bool:
    """Whether a tentative step that raised has left the parameters, and training goes on."""
    model = Net()
    shard(model, config_of("mics", update_locality="element"), units=[nn.Linear])
    optimizer = Raising([p for p in model.parameters() if p.requires_grad], lr=0.01)
    before = model.first.weight.full_tensor()
    for step in range(4):
        loss_of(model, batch(step, 0, ctx.rank), 1).backward()
        try:
            optimizer.step()
        except ArithmeticError:
            assert step == 0
        optimizer.zero_grad()
    after = model.first.weight.full_tensor()
    return 0 < float((after - before).detach().abs().max()) < 0.5


def test_a_tentative_step_that_raises_is_taken_back(ranks: RankPool) -> None:
    assert ranks(4, raised) == [True] * 4


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().double()
    shard(model, config_of("mics"), units=[nn.Linear])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def never_updates(ctx: RankContext, clears: bool) -> None:
    """Gradients are cleared between two backwards of a step, or every second step is left out."""
    model, optimizer = make()
    for step in range(60):
        loss_of(model, batch(step, 0, ctx.rank), 1).backward()
        if clears:
            optimizer.zero_grad()
            loss_of(model, batch(step, 1, ctx.rank), 1).backward()
        if clears or step % 2:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("clears", [True, False])
def test_a_training_that_would_never_update_raises(ranks: RankPool, clears: bool) -> None:
    raises_on_every_rank(lambda: ranks(4, never_updates, clears), LifecycleError, "never updates.*second_hop")


def reads_gradients(ctx: RankContext) -> bool:
    """Many gradients are looked at without a step; then the training goes on."""
    model, optimizer = make()
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(60):
        loss_of(model, batch(step, 0, ctx.rank), 1).backward()
        if step > 50:
            optimizer.step()
        optimizer.zero_grad()
    return any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_gradients_may_be_read_without_steps(ranks: RankPool) -> None:
    assert all(ranks(4, reads_gradients))
