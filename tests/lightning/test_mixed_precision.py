"""Do `bf16-mixed` and `16-mixed` mean to the Trainer and to Fabric what they mean with FSDP2?"""

import contextlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from mics_strategy import ConfigError
from mics_strategy.lightning import validate
from tests.fsdp2_policy import VOCABULARY, Batch, Tagger, batches, full_values, loss_of, mesh_of, trained_by_fsdp2
from tests.lightning.fabric_runs import launched
from tests.lightning.fabric_runs import mics as fabric_mics
from tests.lightning.runs import mics, run, trainer
from tests.ranks import RankContext, RankPool, raises_on_every_rank

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
CASES = [("bf16-mixed", "float32"), ("bf16-mixed", "bfloat16"), ("16-mixed", "float32")]
Outcome = tuple[dict[str, Tensor], list[float]]


class Tagging(LightningModule):
    """Trains a `Tagger`, or another model, with a loss of its own."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model if model is not None else Tagger()
        self.losses: list[float] = []

    def training_step(self, batch: Batch, _: int) -> Tensor:
        tokens, features, target = batch
        if "mixed" in self.trainer.precision:
            assert target.dtype == torch.float32  # the targets of a loss keep their dtype
        loss = loss_of(self.model(tokens, features), tokens, target)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        self.log("loss", loss_of(self.model(*batch[:2]), batch[0], batch[2]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ManualTagging(Tagging):
    """The same steps by hand; the model is a unit below the LightningModule."""

    automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        self.manual_backward(super().training_step(batch, index) / 2)
        if index % 2 == 1:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def own_batches(rank: int, num: int = 4) -> DataLoader:
    return DataLoader(batches(rank), batch_size=None, sampler=range(num))


def _scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)


def _preset(ctx: RankContext) -> str:
    """Shards over all ranks, or in each of several nodes."""
    return "zero3" if ctx.num_nodes == 1 else "mics"


def by_trainer(ctx: RankContext, precision: str, reduce_dtype: str, module: Tagging | None = None) -> Outcome:
    plugin = MixedPrecision(precision, "cpu", _scaler() if precision == "16-mixed" else None)
    module = module if module is not None else Tagging()
    options: dict[str, Any] = {"plugins": [plugin], "use_distributed_sampler": False}
    if module.automatic_optimization:
        options["accumulate_grad_batches"] = 2
    fitting = trainer(ctx, mics(_preset(ctx), reduce_dtype=reduce_dtype), **options)
    fitting.fit(module, own_batches(ctx.rank))
    (logged,) = fitting.validate(module, own_batches(ctx.rank, 1), verbose=False)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert fitting.strategy.sharded.config.param_dtype == DTYPES[precision]
    return full_values(module, "model."), [*module.losses, logged["loss"]]


def by_hand(ctx: RankContext, precision: str, reduce_dtype: str) -> Outcome:
    """Manual optimization."""
    return by_trainer(ctx, precision, reduce_dtype, ManualTagging())


def by_fabric(ctx: RankContext, precision: str, reduce_dtype: str) -> Outcome:
    plugin = FabricMixedPrecision(precision, "cpu", _scaler() if precision == "16-mixed" else None)
    fabric = launched(ctx, fabric_mics(_preset(ctx), reduce_dtype=reduce_dtype), plugins=[plugin])
    model = Tagger()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for index, (tokens, features, target) in enumerate(batches(ctx.rank)):
        scores = wrapped(tokens, features)
        assert scores.dtype == torch.float32
        loss = loss_of(scores, tokens, target)
        with fabric.no_backward_sync(wrapped, enabled=index % 2 == 0):
            fabric.backward(loss / 2)
        losses.append(loss.item())
        if index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        tokens, features, target = batches(ctx.rank)[0]
        losses.append(loss_of(wrapped.eval()(tokens, features), tokens, target).item())
    return full_values(model), losses


def compared(ctx: RankContext, precision: str, reduce_dtype: str) -> dict[str, tuple[Outcome, Outcome]]:
    """What the Trainer and Fabric train, each beside what FSDP2 trains."""
    outcomes = {}
    frameworks: dict[str, Callable[..., Outcome]] = {"Trainer": by_trainer, "manual": by_hand, "Fabric": by_fabric}
    for name, by_framework in frameworks.items():
        scaler = _scaler() if precision == "16-mixed" else None
        dtypes = DTYPES[precision], getattr(torch, reduce_dtype)
        in_autocast = name != "Fabric"
        expected = trained_by_fsdp2(*dtypes, loss_in_autocast=in_autocast, scaler=scaler, replicas=ctx.num_nodes)
        outcomes[name] = by_framework(ctx, precision, reduce_dtype), expected
    return outcomes


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("precision", "reduce_dtype"), CASES)
def test_training_is_that_of_fsdp2_to_the_bit(
    ranks: RankPool, world_size: int, precision: str, reduce_dtype: str
) -> None:
    """On two ranks a sum has one order; FSDP2 also rounds a sum of 16 bits, which is kept in fp32 here."""
    is_rounded = world_size > 1 and reduce_dtype != "float32"
    for outcomes in run(ranks, world_size, compared, precision, reduce_dtype):
        for (values, losses), (expected, expected_losses) in outcomes.values():
            assert losses == (pytest.approx(expected_losses, rel=2e-3) if is_rounded else expected_losses)
            assert list(values) == list(expected)
            for name, value in expected.items():
                assert is_rounded or torch.equal(values[name], value), name


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("16-mixed", marks=pytest.mark.slow)])
def test_mics_trains_as_fsdp2_over_replicas_and_shards_to_the_bit(ranks: RankPool, precision: str) -> None:
    """A partition is a node of two ranks: in it, and between two nodes, a sum has one order."""
    for outcomes in run(ranks, 4, compared, precision, "float32", ranks_per_node=2):
        for outcome, expected in outcomes.values():
            assert_equal_bits(outcome, expected)


def assert_equal_bits(outcome: Outcome, expected: Outcome, dtype: torch.dtype = torch.float32) -> None:
    (values, losses), (expected_values, expected_losses) = outcome, expected
    assert losses == expected_losses
    assert list(values) == list(expected_values)
    for name, value in expected_values.items():
        assert value.dtype == dtype
        assert torch.equal(values[name], value), name


class TrueTagging(Tagging):
    """With an epsilon that fp16 holds: squares of gradients underflow there."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


def true_precision(ctx: RankContext, precision: str) -> tuple[Outcome, Outcome]:
    """Masters in 16 bits, reductions in fp32; each batch is a step."""
    module, dtype = TrueTagging(), TRUE_DTYPES[precision]
    fitting = trainer(ctx, mics(_preset(ctx)), precision=precision, use_distributed_sampler=False)
    fitting.fit(module, own_batches(ctx.rank))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model, mesh = Tagger().to(dtype), mesh_of(ctx.num_nodes)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3), []
    for tokens, features, target in batches(ctx.rank):
        loss = loss_of(model(tokens, features.to(dtype)), tokens, target.to(dtype))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return (full_values(module, "model."), module.losses), (full_values(model), losses)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(
    ("world_size", "num_nodes"),
    [(1, 1), (2, 1), pytest.param(4, 2, marks=pytest.mark.slow)],
    ids=["1", "2", "2 nodes of 2"],
)
@pytest.mark.parametrize("precision", TRUE_DTYPES)
def test_true_precision_is_that_of_fsdp2_with_16_bit_masters_to_the_bit(
    ranks: RankPool, precision: str, world_size: int, num_nodes: int
) -> None:
    for outcome, expected in run(ranks, world_size, true_precision, precision, ranks_per_node=world_size // num_nodes):
        assert_equal_bits(outcome, expected, TRUE_DTYPES[precision])


def _fitted(ctx: RankContext, model: nn.Module | None = None, resumed: Any = None, **options: Any) -> tuple[Any, Any]:
    """A Trainer and its module, after two steps in bf16-mixed."""
    strategy = {"config": "zero3", **{name: options.pop(name) for name in [*options] if name in STRATEGY_OPTIONS}}
    common = {"precision": "bf16-mixed", "use_distributed_sampler": False, "max_epochs": 1}
    module = Tagging(model)
    fitting = trainer(ctx, mics(**strategy), **{**common, **options})
    fitting.fit(module, own_batches(ctx.rank), ckpt_path=resumed)
    return fitting, module


STRATEGY_OPTIONS = ("config", "param_dtype", "state_dict_type")


def round_trip(ctx: RankContext, path: str, before: dict[str, Any]) -> tuple[bool, set[torch.dtype], bool]:
    """Saved by one meaning, loaded by the default one: equal masters, dtypes of the file, equal values of both."""
    saving, module = _fitted(ctx, max_steps=2, **before)
    saved = full_values(module)
    saving.save_checkpoint(path)
    name = {"state_dict_type": before.get("state_dict_type", "full")}
    resumed, other = _fitted(ctx, resumed=path, max_steps=2, **name)
    loaded = full_values(other)
    is_equal = all(torch.equal(value, loaded[name]) for name, value in saved.items())
    dtypes = set()
    if Path(path).is_file():
        dtypes = {value.dtype for value in torch.load(path, weights_only=False)["state_dict"].values()}
    return is_equal, dtypes, resumed.strategy.sharded.config.param_dtype == torch.bfloat16


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
@pytest.mark.parametrize("before", [{}, {"param_dtype": "float32"}], ids=["the default", "autocast"])
def test_checkpoints_hold_fp32_masters_and_those_of_autocast_load(
    ranks: RankPool, tmp_path: Path, before: dict[str, Any], state_dict_type: str
) -> None:
    options = {**before, "state_dict_type": state_dict_type}
    dtypes = {torch.float32} if state_dict_type == "full" else set()
    assert run(ranks, 2, round_trip, str(tmp_path / "saved"), options) == [(True, dtypes, True)] * 2


def frozen(ctx: RankContext) -> tuple[str, torch.dtype]:
    """A model that is only evaluated."""
    fabric = launched(ctx, fabric_mics("zero3"), precision="bf16-mixed")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        model = fabric.setup_module(Tagger().requires_grad_(False))
    tokens, features, _ = batches(ctx.rank)[0]
    return out.getvalue(), model(tokens, features).dtype


def test_a_frozen_model_is_gathered_in_16_bits(ranks: RankPool) -> None:
    text, dtype = run(ranks, 2, frozen)[0]
    assert "parameters in float32 (4 bytes each) are gathered in bfloat16" in text
    assert dtype == torch.float32


def contradicting(ctx: RankContext) -> None:
    _fitted(ctx, param_dtype="float16")


def contradicting_true_precision(ctx: RankContext) -> None:
    _fitted(ctx, param_dtype="float32", precision="bf16-true")


def contradicting_in_fabric(ctx: RankContext) -> None:
    launched(ctx, fabric_mics(param_dtype="float64"), precision="bf16-mixed").setup_module(Tagger())


CONTRADICTIONS = [
    (contradicting, "precision='bf16-mixed'.*computes in bfloat16.*param_dtype=float16.*Remove"),
    (contradicting_in_fabric, "precision='bf16-mixed'.*computes in bfloat16.*param_dtype=float64.*Remove"),
    (contradicting_true_precision, "precision='bf16-true'.*stores and computes in .*param_dtype=.*float32.*Remove"),
]


@pytest.mark.parametrize(("job", "match"), CONTRADICTIONS)
def test_another_param_dtype_is_refused_on_every_rank(ranks: RankPool, job: Callable[..., None], match: str) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, job), ConfigError, match)


class WithBatchNorm(Tagger):
    """With running statistics, which stay in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(17)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        return self.norm(super().forward(tokens, features).transpose(1, 2)).transpose(1, 2)


def said(ctx: RankContext, model: nn.Module | None, options: dict[str, Any]) -> tuple[str, list[str], Any]:
    """What is printed, what is warned of, and the dtype of gathers."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("mics_strategy.mixed_precision")
    log.addHandler(handler)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fitting, _ = _fitted(ctx, model, max_steps=1, **options)
    log.removeHandler(handler)
    lines = [line for line in out.getvalue().splitlines() if "precision=" in line]
    return "\n".join(lines), [r.getMessage() for r in records], fitting.strategy.sharded.config.param_dtype


NOTICES: dict[str, tuple[dict[str, Any], Any, str, str]] = {
    # options, dtype of gathers, line, warning
    "default": ({}, torch.bfloat16, "gathered in bfloat16 (2 bytes each), gradients are reduced in float32 (4 b", ""),
    "autocast": ({"param_dtype": "float32"}, torch.float32, "gathered in float32 (4 bytes each)", "keeps a bfloat16"),
    "autocast, nothing sharded": ({"param_dtype": "float32", "config": "ddp"}, torch.float32, "float32 (4 bytes", ""),
    "true": ({"precision": "bf16-true"}, "auto", "parameters in bfloat16 (2 bytes each) are gathered in bfloat16", ""),
    "a policy": ({"precision": "32-true", "param_dtype": "bfloat16"}, torch.bfloat16, "gathered in bfloat16", ""),
    "fp32": ({"precision": "32-true"}, "auto", "", ""),
}


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("name", NOTICES)
def test_rank_0_says_what_is_gathered_and_reduced_in_one_line(ranks: RankPool, name: str) -> None:
    options, dtype, line, warning = NOTICES[name]
    (found, warnings, found_dtype), *others = run(ranks, 2, said, None, options)
    assert (found_dtype, found.count("\n")) == (dtype, 0)
    assert line in found
    assert bool(found) == bool(line)
    assert [warning in text for text in warnings] == ([True] if warning else [])
    assert all(other[:2] == ("", []) for other in others)


class Scalars(nn.Module):
    """A model of two scalars, whose products autocast does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(0.1))

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        return features.new_ones(*tokens.shape, VOCABULARY) * features[..., :1] * self.a + self.b


class WithDouble(Tagger):
    """With a parameter in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        return super().forward(tokens, features).float()


KEEP_DTYPES = [
    (WithBatchNorm(), "`model.norm` has fp32 running statistics"),
    (Scalars(), "scalars"),
    (WithDouble(), "`model.scale` is float64"),
]


@pytest.mark.parametrize(("model", "reason"), KEEP_DTYPES, ids=["batch norm", "scalars", "fp64"])
def test_a_model_that_needs_its_dtypes_is_not_gathered_in_16_bits(
    ranks: RankPool, model: nn.Module, reason: str
) -> None:
    found, _, dtype = run(ranks, 2, said, model, {})[0]
    assert dtype == "auto"
    assert reason in found


def compiled(ctx: RankContext) -> tuple[list[float], list[float]]:
    """Losses with compiled blocks, and without."""
    model = Tagger()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return _fitted(ctx, model)[1].losses, _fitted(ctx)[1].losses


@pytest.mark.slow
def test_compiled_blocks_train_as_others(ranks: RankPool) -> None:
    for losses, expected in run(ranks, 2, compiled):
        assert losses == pytest.approx(expected, rel=2e-3)


def with_another_precision(ctx: RankContext) -> None:
    _, module = _fitted(ctx, max_steps=1)
    trainer(ctx, "mics_zero3", precision="32-true", use_distributed_sampler=False).fit(module, own_batches(ctx.rank))


def test_a_sharded_model_keeps_its_precision(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, with_another_precision), ConfigError, "already sharded.*`precision`")


def test_an_error_about_two_dtypes_names_the_option() -> None:
    error = RuntimeError("mixed dtype (CPU): expect parameter to have scalar type of Float")
    validate.add_advice(error)
    assert "param_dtype='float32'" in error.__notes__[0]


def in_presets(ctx: RankContext) -> dict[str, list[float]]:
    presets = ("zero3", "ddp", "zero1", "zero2", "mics", "hsdp", "paro-nig", "zeropp")
    return {preset: _fitted(ctx, config=preset)[1].losses for preset in presets}


def test_every_preset_trains_the_same(ranks: RankPool) -> None:
    """But for one that rounds what it sends."""
    for losses in run(ranks, 2, in_presets, ranks_per_node=1):
        assert losses.pop("zeropp") == pytest.approx(losses["zero3"], rel=0.05)
        assert {preset: own == losses["zero3"] for preset, own in losses.items()} == dict.fromkeys(losses, True)
