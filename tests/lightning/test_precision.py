"""Do precision plug-ins do what they do in plain data parallel training?"""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, FSDPPrecision, HalfPrecision, MixedPrecision, Precision

from mics_strategy.errors import ConfigError
from tests.lightning.modules import Regression, loader
from tests.lightning.runs import assert_same, fitted, full, mics, run, trainer
from tests.ranks import RankContext, RankPool


@pytest.mark.parametrize(
    ("precision", "plugin"),
    [
        ("32-true", Precision),
        ("64-true", DoublePrecision),
        ("bf16-true", HalfPrecision),
        ("16-true", HalfPrecision),
        ("bf16-mixed", MixedPrecision),
    ],
)
def test_a_precision_name_becomes_the_plugin_of_any_strategy(
    one_rank: RankContext, precision: Any, plugin: type[Any]
) -> None:
    assert type(trainer(one_rank, "mics", precision=precision).precision_plugin) is plugin


def test_an_invalid_precision_is_refused(one_rank: RankContext) -> None:
    with pytest.raises(ValueError, match="precision"):
        trainer(one_rank, "mics", precision="float")


def test_a_precision_plugin_of_another_strategy_is_refused(one_rank: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"FSDPPrecision.*bf16-mixed"):
        trainer(one_rank, "mics", plugins=[FSDPPrecision("bf16-mixed")])
    with pytest.raises(ConfigError, match="precision_plugin=str"):
        mics(precision_plugin="bf16")


def _dtypes(ctx: RankContext, precision: Any, overrides: dict[str, Any]) -> tuple[Any, ...]:
    class Watching(Regression):
        seen: tuple[Any, ...] = ()

        def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
            with torch.no_grad():
                self.seen = (self.head.weight.dtype, self(batch[0]).dtype)
            return super().loss(batch)

    module = Watching("adamw")
    fitting = trainer(ctx, mics("mics", **overrides), precision=precision, max_steps=1)
    fitting.fit(module, loader())
    state = fitting.optimizers[0].state[module.head.weight]
    return module.head.weight.dtype, state["exp_avg"].dtype, *module.seen


@pytest.mark.parametrize(
    ("precision", "overrides", "expected"),
    [
        # shards, optimizer states, gathered parameters, output
        ("32-true", {}, (torch.float32,) * 4),
        ("64-true", {}, (torch.float64,) * 4),
        ("bf16-true", {}, (torch.bfloat16,) * 4),
        ("bf16-mixed", {}, (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)),
        ("bf16-mixed", {"param_dtype": "float32"}, (torch.float32, torch.float32, torch.float32, torch.bfloat16)),
        ("32-true", {"param_dtype": "bfloat16"}, (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)),
        ("bf16-mixed", {"param_dtype": "bfloat16"}, (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)),
    ],
)
def test_dtypes_follow_the_precision_and_the_config(
    ranks: RankPool, precision: str, overrides: dict[str, Any], expected: Any
) -> None:
    assert run(ranks, 2, _dtypes, precision, overrides) == [expected] * 2


def _like_ddp(ctx: RankContext, precision: Any) -> None:
    strategy = mics(param_dtype="float32") if precision == "bf16-mixed" else "mics"  # autocast over fp32 gathers
    found = fitted(ctx, strategy, Regression(), loader(), precision=precision, gradient_clip_val=0.1)
    expected = fitted(ctx, "ddp", Regression(), loader(), precision=precision, gradient_clip_val=0.1)
    assert_same(found, expected, tolerance=1e-2 if precision == "bf16-true" else 1e-6)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_training_in_another_precision_equals_ddp(ranks: RankPool, precision: str) -> None:
    run(ranks, 4, _like_ddp, precision, ranks_per_node=2)


class Overflowing(Regression):
    """One rank's loss overflows in the third step."""

    rank = -1

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        overflows = batch_idx == 2 and self.trainer.global_rank == self.rank
        return loss + (self.head.weight * torch.inf).sum() if overflows else loss


def _scaled(ctx: RankContext, strategy: Any, rank: int) -> tuple[dict[str, torch.Tensor], Any, dict[str, torch.Tensor]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    module = Overflowing()
    module.rank = rank
    fitting = trainer(ctx, strategy, plugins=[plugin], gradient_clip_val=0.1, max_steps=4)
    fitting.fit(module, loader())
    parameters = {name: full(p) for name, p in module.named_parameters()}
    local = {name: p.to_local().clone() if hasattr(p, "to_local") else p for name, p in module.named_parameters()}
    return (
        parameters,
        plugin.state_dict(),
        {n: p.detach() for n, p in local.items()},
    )


@pytest.mark.parametrize("rank", [-1, 1], ids=["no overflow", "overflow on one rank"])
def test_a_gradient_scaler_agrees_on_overflow_and_equals_ddp(ranks: RankPool, rank: int) -> None:
    expected = run(ranks, 4, _scaled, "ddp", rank, ranks_per_node=2)
    for found, reference in zip(run(ranks, 4, _scaled, "mics", rank, ranks_per_node=2), expected, strict=True):
        assert found[1] == reference[1]  # scale, growth: the same decisions
        assert_same(found[0], reference[0], tolerance=2e-3)


def _resumed_scaler(ctx: RankContext) -> tuple[Any, Any]:
    path = ctx.tmp_path / "scaler.ckpt"
    first = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
    saving = trainer(ctx, "mics", plugins=[first], max_steps=3)
    saving.fit(Regression(), loader())
    saving.save_checkpoint(path)
    second = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer(ctx, "mics", plugins=[second], max_steps=3).fit(Regression(), loader(), ckpt_path=path)
    return first.state_dict(), second.state_dict()


def test_a_scaler_is_saved_and_restored(ranks: RankPool) -> None:
    for saved, restored in run(ranks, 2, _resumed_scaler):
        assert restored == saved


def _initialised(ctx: RankContext, precision: Any) -> torch.dtype:
    with trainer(ctx, "mics", precision=precision).init_module():
        return torch.nn.Linear(2, 2).weight.dtype


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_mixed_precision_initialises_in_fp32_and_true_precision_in_its_own(
    ranks: RankPool, precision: str, dtype: torch.dtype
) -> None:
    assert run(ranks, 1, _initialised, precision) == [dtype]
