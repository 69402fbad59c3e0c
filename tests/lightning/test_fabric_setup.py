"""Does `fabric.setup` make of a module what its user expects, and refuse what would train nothing?"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mics_strategy.errors import ConfigError, LifecycleError
from tests.lightning.fabric_runs import adamw, batches, launched, mics, train, values
from tests.lightning.modules import Critic, Layer, Net, Regression
from tests.lightning.runs import assert_same, run
from tests.ranks import RankContext, RankPool, raises_on_every_rank


def _by_method(ctx: RankContext, strategy: Any, module: nn.Module) -> dict[str, Tensor]:
    fabric = launched(ctx, strategy)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.05))
    is_lightning = isinstance(module, Regression)
    if not is_lightning:
        with pytest.raises(RuntimeError, match="mark_forward_method"):
            model.features(next(batches(fabric))[0])
        model.mark_forward_method("loss")
    for index, (x, y) in enumerate(batches(fabric)):
        fabric.backward(model.training_step([x, y], index) if is_lightning else model.loss(x, y))
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("module", [Net, Regression])
def test_other_methods_than_forward_equal_ddp_when_marked(ranks: RankPool, module: type[nn.Module]) -> None:
    expected = run(ranks, 2, _by_method, "ddp", module())[0]
    assert_same(run(ranks, 2, _by_method, "mics", module())[0], expected)


def _compiled(ctx: RankContext, strategy: Any) -> tuple[dict[str, Tensor], list[str]]:
    fabric = launched(ctx, strategy)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model, optimizer = fabric.setup(torch.compile(net, backend="eager"), optimizer)
    assert type(model._forward_module).__name__ == "OptimizedModule"
    train(fabric, model, optimizer, 8)
    with fabric.no_backward_sync(model):
        pass
    trained = values(model)
    fabric.save(ctx.tmp_path / "compiled", {"model": model})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fabric.load(ctx.tmp_path / "compiled", {"model": model})
    assert_same(values(model), trained, tolerance=0)
    return trained, list(model.state_dict())


def test_a_compiled_module_is_compiled_again_and_equals_ddp(ranks: RankPool) -> None:
    expected, names = run(ranks, 2, _compiled, "ddp")[0]
    found, found_names = run(ranks, 2, _compiled, "mics")[0]
    assert_same(found, expected)
    assert found_names == names == list(Net().state_dict())


def _empty(ctx: RankContext) -> dict[str, Tensor]:
    fabric = launched(ctx)
    with fabric.init_module(empty_init=True):
        layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    assert layers[0].weight.is_meta
    model, optimizer = fabric.setup(layers, optimizer)
    before = values(model)
    everywhere = fabric.all_gather(before)
    assert all((value == value[0]).all() for value in everywhere.values())
    fabric.backward(model(torch.ones(1, 6)).sum())
    optimizer.step()
    assert all((value != before[name]).any() for name, value in values(model).items())
    assert model.device == fabric.device == next(model.parameters()).device
    fabric.to_device(model)
    return values(model)


def test_a_meta_model_gets_equal_values_and_trains(ranks: RankPool) -> None:
    results = run(ranks, 2, _empty)
    assert_same(results[1], results[0], tolerance=0)


class Counts(nn.Module):
    """A metric: neither parameters nor registered buffers, like a state of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_to: list[Any] = []

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self.moved_to.append(fn(torch.empty(0)).device)
        return super()._apply(fn, recurse)


def _moved(ctx: RankContext) -> None:
    fabric = launched(ctx)
    net = Net()
    net.metric = Counts()
    held = [id(p) for p in net.parameters()]
    fabric.to_device(net)
    assert net.metric.moved_to == []
    assert [id(p) for p in net.parameters()] == held
    net.apply = None  # a gather for every module, in some strategies
    fabric.setup_module(net)
    assert net.metric.moved_to == [fabric.device]
    assert all(isinstance(p, DTensor) for p in net.parameters())


def test_plain_models_are_not_moved_and_metrics_are(ranks: RankPool) -> None:
    run(ranks, 2, _moved)


def _units(ctx: RankContext) -> list[str]:
    fabric = launched(ctx, mics(units=["Layer", nn.Linear]))
    model = fabric.setup(Net())
    assert all(isinstance(layer, Layer) for layer in model.layers)
    return [unit.name for unit in fabric.strategy.sharded_of(model).internals.units]


def test_units_are_what_the_rule_chooses(ranks: RankPool) -> None:
    (names,) = run(ranks, 1, _units)
    assert {"layers.0", "layers.1", "layers.2", "layers.0.up", "head"} <= set(names)


def _refused(ctx: RankContext, what: str) -> None:
    fabric = launched(ctx)
    net, other = Net(), Critic()
    if what == "no model":
        fabric.setup_optimizers(adamw(other))
    if what == "foreign parameters":
        fabric.setup(net, torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1))
    if what == "twice":
        fabric.setup(net)
        fabric.setup(net)
    if what == "of a stranger":
        fabric.strategy.sharded_of(net)


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("no model", LifecycleError, "is not an optimizer of a model that this strategy has set up"),
        ("foreign parameters", ConfigError, "one optimizer per sharded model"),
        ("twice", ConfigError, "sharded already"),
        ("of a stranger", LifecycleError, "Net is not a model that this strategy has set up"),
    ],
)
def test_what_would_train_nothing_is_refused_on_every_rank(
    ranks: RankPool, what: str, kind: type[Exception], message: str
) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _refused, what), kind, message)
