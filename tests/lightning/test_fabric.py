"""Does `Fabric(strategy="mics")` train what plain data parallel training trains?"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from mics_strategy.errors import LifecycleError
from tests.lightning.fabric_runs import adamw, batches, launched, mics, train, values
from tests.lightning.modules import Critic, Net, loader
from tests.lightning.runs import assert_same, run
from tests.ranks import RankContext, RankPool, raises_on_every_rank


def _set_up(fabric: Any, order: str) -> tuple[Any, Any]:
    """A model and its optimizer, in one of the orders in which users write it."""
    model: nn.Module = Net()
    if order == "jointly":
        return fabric.setup(model, adamw(model))
    if order == "optimizer built later":
        wrapped = fabric.setup_module(model)
        return wrapped, fabric.setup_optimizers(adamw(wrapped))
    optimizer = adamw(model)
    return fabric.setup_module(model), fabric.setup_optimizers(optimizer)


def _accumulated(ctx: RankContext, strategy: Any, order: str, signal: str) -> tuple[dict[str, Tensor], list[float]]:
    """Three windows of two micro-steps and one that is incomplete, clipped."""
    fabric = launched(ctx, strategy)
    model, optimizer = _set_up(fabric, order)
    norms = []
    data = list(batches(fabric, num=56 if ctx.world_size == 4 else 28))
    assert len(data) == 7
    for index, (x, y) in enumerate(data):
        ends = index % 2 == 1 or index == len(data) - 1
        blocked = {"right": not ends, "inverted": ends, "always": True, "never": False}[signal]
        with fabric.no_backward_sync(model, enabled=blocked):
            fabric.backward(F.mse_loss(model(x), y) / 2)
        if ends:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.3)
            assert type(norm) is Tensor
            norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
    if strategy != "ddp":
        sharded = fabric.strategy.sharded_of(model)
        assert all(row.planned_bytes == row.sent_bytes for row in sharded.traffic())
        _refuse_unequal_replicas(fabric, model)
    return values(model), norms


def _refuse_unequal_replicas(fabric: Any, model: Any) -> None:
    everywhere = fabric.all_gather(values(model))
    assert all((value == value[0]).all() for value in everywhere.values())


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("order", ["jointly", "optimizer built later", "optimizer built before"])
def test_training_equals_ddp_in_every_order_of_setting_up(ranks: RankPool, order: str) -> None:
    expected, norms = run(ranks, 4, _accumulated, "ddp", order, "right", ranks_per_node=2)[0]
    for found, found_norms in run(ranks, 4, _accumulated, "mics", order, "right", ranks_per_node=2):
        assert_same(found, expected)
        assert found_norms == pytest.approx(norms)
    before = {f"0.{name}": p for name, p in Net().named_parameters()}
    assert all((found[name] != value).any() for name, value in before.items())


def test_a_wrong_signal_costs_overlap_and_no_gradient(ranks: RankPool) -> None:
    expected, _ = run(ranks, 4, _accumulated, "ddp", "jointly", "right", ranks_per_node=2)[0]
    for signal in ("inverted", "always", "never"):
        found, _ = run(ranks, 4, _accumulated, "mics", "jointly", signal, ranks_per_node=2)[0]
        assert_same(found, expected)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("name", ["mics_zero1", "mics_zero2", "mics_zero3", "mics_ddp"])
def test_other_presets_equal_ddp(ranks: RankPool, name: str) -> None:
    expected, _ = run(ranks, 2, _accumulated, "ddp", "jointly", "right")[0]
    assert_same(run(ranks, 2, _accumulated, name, "jointly", "right")[0][0], expected)


def _second_hops(ctx: RankContext) -> list[int]:
    """Of a step whose two micro-steps are announced, and of one step without micro-steps."""
    fabric = launched(ctx)
    model, optimizer = _set_up(fabric, "jointly")
    ((x, y),) = list(batches(fabric, num=8))
    found = []
    for num in (2, 1):
        for index in range(num):
            with fabric.no_backward_sync(model, enabled=index < num - 1):
                fabric.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        rows = fabric.strategy.sharded_of(model).traffic()
        found.append(sum(row.sent_bytes for row in rows if row.collective == "all_reduce"))
    return found


def test_blocked_micro_steps_send_no_second_hop(ranks: RankPool) -> None:
    for two, one in run(ranks, 4, _second_hops, ranks_per_node=2):
        assert two == one > 0


def _blocks_a_stranger(ctx: RankContext) -> None:
    fabric = launched(ctx)
    control = fabric.strategy._backward_sync_control
    for enabled in (True, False):
        with pytest.raises(TypeError, match=r"was set up by this strategy. Got: Linear"):
            control.no_backward_sync(nn.Linear(2, 2), enabled)


def test_only_modules_that_were_set_up_can_be_blocked(ranks: RankPool) -> None:
    run(ranks, 1, _blocks_a_stranger)


def _clipped(ctx: RankContext, strategy: Any) -> list[tuple[Any, dict[str, Tensor]]]:
    """Norm and parameters after one clipped step of each kind, with two optimizers for one model."""
    found = []
    for clipping in ({"clip_val": 0.01}, {"max_norm": 0.1}, {"max_norm": 0.1, "norm_type": "inf"}, {"max_norm": 1e9}):
        fabric = launched(ctx, strategy)
        net = Net()
        first = torch.optim.SGD(net.layers.parameters(), lr=0.5)
        second = torch.optim.SGD([*net.head.parameters(), net.offset], lr=0.5)
        model, first, second = fabric.setup(net, first, second)
        x, y = next(batches(fabric))
        fabric.backward(F.mse_loss(model(x), y))
        norm = fabric.clip_gradients(model, first, **clipping)
        first.step()
        second.step()
        found.append((norm if norm is None else norm.item(), values(model)))
    return found


def test_clipping_equals_ddp_and_touches_the_optimizers_own_parameters(ranks: RankPool) -> None:
    expected = run(ranks, 2, _clipped, "ddp")[0]
    for found in run(ranks, 2, _clipped, "mics"):
        for (norm, parameters), (expected_norm, expected_parameters) in zip(found, expected, strict=True):
            assert norm == (None if expected_norm is None else pytest.approx(expected_norm))
            assert_same(parameters, expected_parameters)


def _overflows(ctx: RankContext) -> None:
    fabric = launched(ctx)
    model, optimizer = _set_up(fabric, "jointly")
    x, y = next(batches(fabric))
    fabric.backward(F.mse_loss(model(x), y) * (torch.inf if ctx.rank == 0 else 1.0))
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    assert not norm.isfinite()
    fabric.clip_gradients(model, optimizer, max_norm=1.0)


def test_a_norm_that_is_not_finite_is_an_error_on_every_rank(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _overflows), LifecycleError, "gradient norm is")


def _two_models(ctx: RankContext, strategy: Any) -> dict[str, Tensor]:
    """One model's output goes through the other."""
    fabric = launched(ctx, strategy)
    net, critic = Net(), Critic()
    model, optimizer = fabric.setup(net, adamw(net))
    judge, judging = fabric.setup(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    for x, y in batches(fabric, 16):
        fabric.backward(judge(model(x)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        judging.zero_grad()
        fabric.backward((judge(y) - judge(model(x).detach())).mean())
        judging.step()
        judging.zero_grad()
    return values(model, judge)


def test_two_models_equal_ddp(ranks: RankPool) -> None:
    expected = run(ranks, 2, _two_models, "ddp")[0]
    for found in run(ranks, 2, _two_models, "mics"):
        assert_same(found, expected)


AUTOCAST = "mics, autocast over fp32 gathers"


def _strategy(name: str) -> Any:
    return mics(param_dtype="float32") if name == AUTOCAST else name


def _precise(ctx: RankContext, strategy: Any, precision: Any) -> dict[str, Tensor]:
    fabric = launched(ctx, _strategy(strategy), precision=precision)
    with fabric.init_module():
        net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    train(fabric, model, optimizer)
    return values(model)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_training_in_another_precision_equals_ddp(ranks: RankPool, precision: str) -> None:
    expected = run(ranks, 2, _precise, "ddp", precision)[0]
    found = run(ranks, 2, _precise, AUTOCAST if precision == "bf16-mixed" else "mics", precision)[0]
    dtypes = {"64-true": torch.float64, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}
    assert {value.dtype for value in found.values()} == {dtypes[precision]}
    assert_same(found, expected, tolerance=1e-2 if precision == "bf16-true" else 1e-6)


def _scaled(ctx: RankContext, strategy: Any, rank: int) -> tuple[dict[str, Tensor], Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fabric = launched(ctx, _strategy(strategy), plugins=[plugin])
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    for index, (x, y) in enumerate(batches(fabric)):
        factor = torch.inf if index == 2 and ctx.rank == rank else 1.0
        fabric.backward(F.mse_loss(model(x), y) * factor)
        fabric.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    return values(model), plugin.state_dict()


@pytest.mark.parametrize("rank", [-1, 1], ids=["no overflow", "overflow on one rank"])
def test_a_gradient_scaler_equals_ddp(ranks: RankPool, rank: int) -> None:
    expected, state = run(ranks, 2, _scaled, "ddp", rank)[0]
    for found, found_state in run(ranks, 2, _scaled, AUTOCAST, rank):
        assert_same(found, expected)
        assert found_state == state


def _evaluated(ctx: RankContext, strategy: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """Some layers frozen, a scheduler, and evaluation between steps."""
    fabric = launched(ctx, strategy)
    net = Net()
    net.layers[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=scheduler)
    outputs = []
    for context in (torch.no_grad(), torch.inference_mode()):
        model.eval()
        with context:
            outputs.append(model(torch.ones(2, 6)).tolist())
        model.train()
        train(fabric, model, optimizer, 8)
        scheduler.step()
    return values(model), outputs


def test_evaluation_between_steps_equals_ddp(ranks: RankPool) -> None:
    expected, expected_outputs = run(ranks, 2, _evaluated, "ddp")[0]
    found, outputs = run(ranks, 2, _evaluated, "mics")[0]
    assert_same(found, expected)
    torch.testing.assert_close(torch.tensor(outputs), torch.tensor(expected_outputs))


def _with_closure(ctx: RankContext, strategy: Any) -> dict[str, Tensor]:
    fabric = launched(ctx, strategy)
    model, optimizer = _set_up(fabric, "jointly")
    for x, y in batches(fabric, 16):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            fabric.backward(loss)
            return loss

        assert optimizer.step(closure).dim() == 0
    return values(model)


def test_closures_equal_ddp(ranks: RankPool) -> None:
    expected = run(ranks, 2, _with_closure, "ddp")[0]
    assert_same(run(ranks, 2, _with_closure, "mics")[0], expected)


def _communicated(ctx: RankContext) -> None:
    fabric = launched(ctx)
    rank = torch.tensor([float(ctx.rank)])
    assert fabric.all_gather({"a": rank})["a"].tolist() == [[0.0], [1.0], [2.0], [3.0]]
    assert fabric.all_reduce(rank.clone()).item() == 1.5
    in_place = rank.clone()
    fabric.all_reduce(in_place, reduce_op="sum")
    assert in_place.item() == 6.0
    assert fabric.broadcast({"rank": ctx.rank}, src=2) == {"rank": 2}
    assert fabric.strategy.reduce_boolean_decision(ctx.rank == 0, all=False)
    assert not fabric.strategy.reduce_boolean_decision(ctx.rank == 0)
    fabric.barrier()
    data = [float(x.sum()) for x, _ in batches(fabric)]
    everyone = fabric.all_gather(torch.tensor(data))
    assert everyone.shape == (4, 4)
    assert everyone.unique().numel() == 16
    assert fabric.strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": ctx.rank}


def test_ranks_talk_and_read_different_data(ranks: RankPool) -> None:
    run(ranks, 4, _communicated, ranks_per_node=2)


class TwoStepsInOne(LightningModule):
    """Manual optimization: a training step has two backwards and two optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for scale in (1.0, 2.0):
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(scale * self(batch[0]), batch[1]))
            optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def _trained_manually(ctx: RankContext) -> tuple[dict[str, Tensor], float]:
    """All ranks train on the same samples, so that the mean gradient is that of one process."""
    fabric = launched(ctx)
    module = TwoStepsInOne()
    model, _ = fabric.setup(module, module.configure_optimizers())
    data = list(loader(num=16))
    for index, batch in enumerate(data):
        model.training_step(batch, index)
    model.eval()
    with torch.no_grad():
        loss = model.validation_step(data[0], 0)
    return values(model), float(loss)


def test_a_manual_training_step_may_hold_backwards_and_optimizer_steps(ranks: RankPool) -> None:
    plain, data = TwoStepsInOne(), list(loader(num=16))
    optimizer = plain.configure_optimizers()
    for x, y in data:
        for scale in (1.0, 2.0):
            optimizer.zero_grad()
            F.mse_loss(scale * plain(x), y).backward()
            optimizer.step()
    expected = {f"0.{name}": parameter for name, parameter in plain.named_parameters()}
    for found, loss in run(ranks, 4, _trained_manually, ranks_per_node=2):
        assert_same(found, expected)
        assert loss == pytest.approx(plain.validation_step(data[0], 0).item())


class LossOfItsOwn(TwoStepsInOne):
    """Manual optimization with a marked method that uses a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor([1.5, 0.5, 1.0]))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.gain * F.mse_loss(self(x), y)).sum()


def _trained_by_a_marked_method(ctx: RankContext) -> dict[str, Tensor]:
    fabric = launched(ctx)
    module = LossOfItsOwn()
    model, optimizer = fabric.setup(module, adamw(module))
    model.mark_forward_method("loss")
    for x, y in loader(num=16):
        optimizer.zero_grad()
        fabric.backward(model.loss(x, y))
        optimizer.step()
    return values(model)


def test_a_marked_method_of_a_manual_module_has_the_parameters_of_the_root(ranks: RankPool) -> None:
    plain = LossOfItsOwn()
    optimizer = adamw(plain)
    for x, y in loader(num=16):
        optimizer.zero_grad()
        plain.loss(x, y).backward()
        optimizer.step()
    expected = {f"0.{name}": parameter for name, parameter in plain.named_parameters()}
    for found in run(ranks, 2, _trained_by_a_marked_method):
        assert_same(found, expected)


def _with_codecs(ctx: RankContext) -> tuple[bool, bool]:
    """Whether feedback holds residuals, and whether traffic was as planned."""
    grad_codec = {"bits": 4, "block_size": 32, "feedback": True, "rotation": True}
    weight_codec = {"bits": 4, "block_size": 32, "differences": True}
    fabric = launched(ctx, mics("paro-iig", grad_codec=grad_codec, weight_codec=weight_codec))
    model, optimizer = _set_up(fabric, "jointly")
    train(fabric, model, optimizer)
    sharded = fabric.strategy.sharded_of(model)
    held = [
        residual.values.any() for feedback in sharded.internals.feedback for residual in feedback.residuals.values()
    ]
    return any(map(bool, held)), all(row.planned_bytes == row.sent_bytes for row in sharded.traffic())


def test_feedback_and_differences_are_taken_as_mappings(ranks: RankPool) -> None:
    found = run(ranks, 4, _with_codecs, ranks_per_node=2)
    assert any(held for held, _ in found)
    assert all(is_planned for _, is_planned in found)
