"""Is the model sharded once, as it was asked for, wherever it was built?"""

from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mics_strategy.errors import ConfigError
from tests.lightning.modules import Layer, Plain, Regression, loader
from tests.lightning.runs import assert_same, fitted, mics, run, trainer, whole
from tests.ranks import RankContext, RankPool, raises_on_every_rank


def _sharded(ctx: RankContext, module: LightningModule, **options: Any) -> Any:
    fitting = trainer(ctx, mics(**options), max_steps=1)
    fitting.fit(module, loader())
    return fitting.strategy.sharded


def _scopes(ctx: RankContext, config: str, options: dict[str, Any]) -> tuple[int, int, int]:
    scopes = _sharded(ctx, Regression(), config=config, **options).scopes
    return scopes.params, scopes.grads, scopes.optimizer


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ("mics", {}, (2, 2, 2)),
        ("mics", {"partition_size": 4}, (4, 4, 4)),
        ("paro-iig", {"second_hop": "boundary", "overlap": "none"}, (2, 2, 4)),
        ("zero1", {"overlap": "none"}, (1, 1, 4)),
    ],
)
def test_a_partition_is_a_node_unless_said_otherwise(ranks: RankPool, config: str, options: Any, expected: Any) -> None:
    assert run(ranks, 4, _scopes, config, options, ranks_per_node=2) == [expected] * 4


def _chosen_scopes(ctx: RankContext) -> None:
    """A second Trainer, which accumulates less, finds the model as the first one has sharded it."""
    data, options = loader(), {"accumulate_grad_batches": 3}
    expected = fitted(ctx, "ddp", Regression("adamw"), data, **options)
    module, strategy = Regression("adamw"), mics("auto")
    assert_same(fitted(ctx, strategy, module, data, **options), expected)
    assert strategy.sharded.config.micro_steps == 3
    trainer(ctx, mics("auto"), max_steps=1).fit(module, data)
    stated = mics("auto", micro_steps=5)
    trainer(ctx, stated, max_steps=1, **options).fit(Regression(), data)
    assert stated.sharded.config.micro_steps == 5


def test_scopes_are_chosen_for_the_accumulation_of_the_trainer(ranks: RankPool) -> None:
    run(ranks, 4, _chosen_scopes, ranks_per_node=2)


def _unit_names(ctx: RankContext, units: Any) -> list[str]:
    return [unit.name for unit in _sharded(ctx, Regression(), units=units).internals.units]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 9


LAYERS = ["(root)", "layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("auto", LAYERS),
        ("Layer", LAYERS),
        (["tests.lightning.modules.Layer", nn.LayerNorm], [*LAYERS, "norm"]),
        (Layer, LAYERS),
        ({Layer, nn.LayerNorm}, [*LAYERS, "norm"]),
        (_is_linear, ["(root)", "layers.0.up", "layers.1.up", "layers.2.up"]),
        (100, LAYERS),
        (10_000, ["(root)"]),
    ],
    ids=str,
)
def test_units_are_what_the_rule_chooses(ranks: RankPool, units: Any, expected: list[str]) -> None:
    assert run(ranks, 1, _unit_names, units) == [expected]


class Manual(Regression):
    """With manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self(batch[0]).sum())


def _manual_unit_names(ctx: RankContext, units: Any) -> list[str]:
    return [unit.name for unit in _sharded(ctx, Manual(), units=units).internals.units]


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("auto", ["(root)", "layers", "layers.0", "layers.1", "layers.2", "norm", "head"]),
        (_is_linear, ["(root)", "layers", "layers.0.up", "layers.1.up", "layers.2.up", "norm", "head"]),
        (["Layer"], ["(root)", "layers", "layers.0", "layers.1", "layers.2", "norm", "head"]),
        (nn.LayerNorm, ["(root)", "layers", "norm", "head"]),
        (100, LAYERS),
    ],
    ids=str,
)
def test_with_manual_optimization_every_child_is_a_unit(ranks: RankPool, units: Any, expected: list[str]) -> None:
    assert run(ranks, 1, _manual_unit_names, units) == [expected]


class ShardedElsewhere(Plain):
    """Something else has sharded a part of it."""

    def configure_model(self) -> None:
        fully_shard(self.layer, mesh=init_device_mesh("cpu", (2,)))


def test_a_model_sharded_by_somebody_else_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _sharded, ShardedElsewhere()), ConfigError, r"layer\.weight.*DTensor")


def _devices(ctx: RankContext, empty_init: bool, precision: Any) -> tuple[Any, ...]:
    fitting = trainer(ctx, mics(), precision=precision, max_steps=0)
    with fitting.init_module(empty_init=empty_init):
        module = Plain()
    before = module.layer.weight.device.type
    fitting.fit(module, loader())
    weight = module.layer.weight
    values = whole(fitting)["layer.weight"]
    return before, weight.to_local().device.type, weight.dtype, values.abs().max().item() > 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("empty_init", [False, True])
def test_a_model_is_built_on_the_cpu_or_nowhere_and_ends_on_the_device(
    ranks: RankPool, empty_init: bool, precision: str
) -> None:
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    expected = ("meta" if empty_init else "cpu", "cpu", dtype, True)
    assert run(ranks, 2, _devices, empty_init, precision) == [expected] * 2


class Odd(nn.Module):
    """Has a parameter and no way to give it values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 2))


class OnMeta(Plain):
    """Is built in `configure_model`, on the meta device."""

    kind = "linear"

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.resets: list[str] = []
        self.configured = 0

    def configure_model(self) -> None:
        self.configured += 1
        if hasattr(self, "layer"):
            return
        resets = self.resets

        class Watched(nn.Linear):
            def reset_parameters(self) -> None:
                resets.append(self.weight.device.type)
                super().reset_parameters()

        with torch.device("meta"):
            self.layer = Watched(6, 2) if self.kind == "linear" else Odd()


def _from_meta(ctx: RankContext) -> tuple[list[str], int, dict[str, Tensor]]:
    module = OnMeta()
    fitting = trainer(ctx, "mics", max_steps=1)
    fitting.fit(module, loader())
    handle = fitting.strategy.sharded
    fitting.validate(WithValidation.of(module), loader(4), verbose=False)
    assert fitting.strategy.sharded is handle
    return module.resets, module.configured, whole(fitting)


class WithValidation:
    """Adds a validation step to a module that exists."""

    @staticmethod
    def of(module: LightningModule) -> LightningModule:
        type(module).validation_step = type(module).training_step
        return module


def test_a_meta_model_gets_memory_then_values_once_and_equal_on_all_ranks(ranks: RankPool) -> None:
    results = run(ranks, 2, _from_meta)
    for resets, configured, parameters in results:
        assert resets == ["meta", "cpu"]  # torch's own constructor, then ours, with memory
        assert configured == 2  # Lightning asks again in every stage; the model stays
        assert_same(parameters, results[0][2], tolerance=0)


class OddOnMeta(OnMeta):
    """With a module that cannot initialise itself."""

    kind = "odd"


def test_a_meta_module_without_values_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _sharded, OddOnMeta()), ConfigError, "Odd.*reset_parameters")


def _moved(ctx: RankContext) -> tuple[str, str, str]:
    module = Regression()
    module.metric = torchmetrics.MeanMetric()
    fitting = trainer(ctx, "mics", max_steps=1)
    fitting.fit(module, loader())
    fitting.strategy.parallel_devices = [torch.device("meta")] * ctx.ranks_per_node  # a device that any machine has
    fitting.strategy.model_to_device()
    return module.metric.mean_value.device.type, module.metric.device.type, module.head.weight.to_local().device.type


def test_metrics_are_moved_and_parameters_are_not(ranks: RankPool) -> None:
    assert run(ranks, 2, _moved) == [("meta", "meta", "cpu")] * 2


class WithBatchNorm(Plain):
    """Has a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.eval()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.norm(self.layer(batch[0]))


def _synchronised(ctx: RankContext, stage: str) -> tuple[str, list[str]]:
    module = WithBatchNorm()
    running = trainer(ctx, "mics", sync_batchnorm=True, max_steps=0)
    getattr(running, stage)(module, loader(4))
    return type(module.norm).__name__, [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_batch_norms_are_synchronised_in_every_stage(ranks: RankPool, stage: str) -> None:
    names = ["layer.weight", "layer.bias", "norm.weight", "norm.bias"]
    assert run(ranks, 2, _synchronised, stage) == [("SyncBatchNorm", names)] * 2


def _sharded_twice(ctx: RankContext) -> None:
    module = Regression()
    _sharded(ctx, module, config="mics")
    _sharded(ctx, module, config="zero3")


def test_the_same_model_is_not_sharded_in_two_ways(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _sharded_twice), ConfigError, "already sharded")


class ForeignParameters(Plain):
    """Gives its optimizer a parameter that is not its own."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)


class EarlyOptimizer(Plain):
    """Builds its optimizer before the model is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.early = [torch.optim.AdamW(self.parameters(), lr=0.1)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early[0]


def test_an_optimizer_with_foreign_parameters_is_refused_on_every_rank(ranks: RankPool) -> None:
    message = "not a parameter of the sharded model"
    raises_on_every_rank(lambda: run(ranks, 2, _sharded, ForeignParameters()), ConfigError, message)


def _optimizer_parameters(ctx: RankContext, kind: type[LightningModule]) -> bool:
    module = kind()
    before = module.layer.weight.detach().clone()
    fitting = trainer(ctx, "mics", max_steps=1)
    fitting.fit(module, loader())
    held = [p for group in fitting.optimizers[0].param_groups for p in group["params"]]
    assert not torch.equal(whole(fitting)["layer.weight"], before)
    return all(mine is p for mine, p in zip(held, module.parameters(), strict=True))


@pytest.mark.parametrize("kind", [Plain, EarlyOptimizer])
def test_optimizers_hold_the_sharded_parameters_whenever_they_were_built(ranks: RankPool, kind: Any) -> None:
    assert run(ranks, 2, _optimizer_parameters, kind) == [True] * 2
