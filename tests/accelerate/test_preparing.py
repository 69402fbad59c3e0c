"""What may be prepared, and what do clipping, precision and compilation do with it?"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from mics_strategy.accelerate import MiCSAccelerator
from mics_strategy.errors import ConfigError, LifecycleError, MiCSError
from tests.accelerate.runs import PLAIN, accelerator, assert_same, run, values
from tests.accelerate.test_training import adamw, loader, loss_of, transformer
from tests.models import Block, Transformer
from tests.ranks import RankContext, RankPool, assert_refused, refusal


def train(acc: Any, model: Any, optimizer: Any, data: DataLoader, clip: float | None = 0.3) -> list[float]:
    """One epoch; the losses and norms."""
    numbers = []
    for (tokens,) in data:
        loss = loss_of(model, tokens)
        acc.backward(loss)
        if clip is not None:
            numbers.append(acc.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(loss.item())
    return numbers


def equal_to_ddp(ranks: RankPool, fn: Callable[..., Any], *args: Any, tolerance: float = 1e-6) -> None:
    """Whether a job gives the same values and numbers with the preset "mics" on two nodes of two ranks."""
    plain = run(ranks, 4, fn, PLAIN, *args, ranks_per_node=2)
    sharded = run(ranks, 4, fn, "mics", *args, ranks_per_node=2)
    for (found, numbers), (expected, expected_numbers) in zip(sharded, plain, strict=True):
        assert_same(found, expected, tolerance)
        assert numbers == pytest.approx(expected_numbers, rel=max(1e-5, tolerance))


def two_models(ctx: RankContext, config: str, clip: str, limit: float) -> tuple[dict[str, Tensor], list[float]]:
    """Two models with an optimizer each, one loss, gradients of both clipped together or each by itself."""
    acc = accelerator(config)
    first, second = transformer(), nn.Linear(29, 29)
    with torch.no_grad():
        second.weight.copy_(torch.eye(29) * 2)
        second.bias.zero_()
    optimizers = adamw(first), adamw(second)
    first, second, *optimizers = acc.prepare(first, second, *optimizers)
    data, numbers = acc.prepare(loader()), []
    for (tokens,) in data:
        logits = second(first(tokens))
        acc.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
        if clip == "together":
            numbers.append(acc.clip_grad_norm_([*first.parameters(), *second.parameters()], limit).item())
        else:
            numbers += [acc.clip_grad_norm_(model.parameters(), limit).item() for model in (first, second)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {**values(first), **values(second)}, numbers


@pytest.mark.parametrize(("clip", "limit"), [("together", 0.3), ("each", 0.3), ("together", 300.0), ("each", 300.0)])
def test_several_models_are_clipped_and_trained_as_with_ddp(ranks: RankPool, clip: str, limit: float) -> None:
    equal_to_ddp(ranks, two_models, clip, limit)


def clipped_by_value(ctx: RankContext, config: str) -> tuple[dict[str, Tensor], list[float]]:
    acc = accelerator(config)
    model, data = acc.prepare(transformer(), loader())
    optimizer = acc.prepare(adamw(model))
    for (tokens,) in data:
        acc.backward(loss_of(model, tokens))
        acc.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return values(model), []


def test_clipping_by_value_equals_ddp(ranks: RankPool) -> None:
    equal_to_ddp(ranks, clipped_by_value)


def in_bfloat16(ctx: RankContext, config: str) -> tuple[dict[str, Tensor], list[float]]:
    """Autocast over fp32 gathers."""
    options = {} if config == PLAIN else {"param_dtype": "float32"}
    acc = accelerator(config, accelerator_mixed_precision="bf16", **options)
    model = transformer()
    model, optimizer, data = acc.prepare(model, adamw(model), loader())
    numbers = train(acc, model, optimizer, data)
    assert model(next(iter(data))[0]).dtype == torch.float32
    return values(model), numbers


def test_autocast_over_fp32_gathers_equals_ddp(ranks: RankPool) -> None:
    equal_to_ddp(ranks, in_bfloat16, tolerance=2e-5)


def by_policy(ctx: RankContext) -> tuple[str, str, str, bool]:
    """A policy instead of autocast: what travels, what comes out, what is stepped on."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    acc = accelerator("mics", mixed_precision_policy=policy, accelerator_mixed_precision="bf16")
    model = transformer().bfloat16()
    model, optimizer, data = acc.prepare(model, adamw(model), loader())
    train(acc, model, optimizer, data)
    out = model(next(iter(data))[0])
    config = acc.sharded_of(model).config
    is_fp32 = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return str(config.param_dtype), str(config.reduce_dtype), str(out.dtype), is_fp32


def test_a_policy_takes_the_place_of_autocast(ranks: RankPool) -> None:
    expected = ("torch.bfloat16", "torch.float32", "torch.bfloat16", True)
    assert run(ranks, 2, by_policy) == [expected] * 2


def scaled(ctx: RankContext, config: str) -> tuple[dict[str, Tensor], list[float]]:
    """fp16's scaler; the gradients of rank 1 overflow once."""
    acc = accelerator(config)
    acc.scaler, acc.native_amp = GradScaler("cpu", init_scale=2.0**10), True
    model = transformer()
    model, optimizer, data = acc.prepare(model, adamw(model), loader())
    numbers = []
    for index, (tokens,) in enumerate(data):
        loss = loss_of(model, tokens)
        acc.backward(loss * float("inf") if index == 2 and ctx.rank == 1 else loss)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [float(optimizer.step_was_skipped), acc.scaler.get_scale()]
    return values(model), numbers


def test_overflow_on_one_rank_skips_the_step_on_all(ranks: RankPool) -> None:
    equal_to_ddp(ranks, scaled)
    numbers = run(ranks, 4, scaled, "mics", ranks_per_node=2)[3][1]
    assert numbers[4:6] == [1.0, 2.0**9]


def recomputed(ctx: RankContext, config: str) -> tuple[dict[str, Tensor], list[float]]:
    """Activation checkpointing; the plain run keeps everything."""
    options = {} if config == PLAIN else {"activation_checkpointing": True, "units": "Block"}
    acc = accelerator(config, **options)
    model = transformer()
    calls = []
    model.blocks[1].qkv.register_forward_hook(lambda *_: calls.append(1))
    model, optimizer, data = acc.prepare(model, adamw(model), loader(16))
    numbers = train(acc, model, optimizer, data)
    assert len(calls) == len(data) * (1 if config == PLAIN else 2)
    if config != PLAIN:
        assert all(row.planned_bytes == row.sent_bytes for row in acc.sharded_of(model).traffic())
    return values(model), numbers


def test_activation_checkpointing_recomputes_units_and_sends_nothing_more(ranks: RankPool) -> None:
    equal_to_ddp(ranks, recomputed)


def compiled(ctx: RankContext, config: str, form: str) -> tuple[dict[str, Tensor], list[float]]:
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=form == "regional")
    options = {} if form == "by the script" or config == PLAIN else {"accelerator_dynamo_plugin": plugin}
    acc = accelerator(config, **options)
    model = transformer()
    optimizer = adamw(model)
    if form == "by the script" and config != PLAIN:
        model = torch.compile(model, backend="aot_eager")
    model, optimizer, data = acc.prepare(model, optimizer, loader(16))
    numbers = train(acc, model, optimizer, data)
    if config != PLAIN:
        acc.load_state(acc.save_state(str(ctx.tmp_path / "state")))
    plain = acc.unwrap_model(model, keep_torch_compile=False)
    assert isinstance(plain, Transformer)
    return values(plain), numbers


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("form", ["regional", "whole", "by the script"])
def test_compiled_models_train_and_are_saved_under_plain_names(ranks: RankPool, form: str) -> None:
    equal_to_ddp(ranks, compiled, form, tolerance=2e-5)


def evaluated(ctx: RankContext, config: str) -> tuple[dict[str, Tensor], list[float]]:
    """A model without an optimizer, and metrics over a set that does not divide by the ranks."""
    acc = accelerator(config)
    model, data = acc.prepare(transformer(), loader(21))
    model.eval()
    numbers: list[float] = []
    for (tokens,) in data:
        with torch.no_grad():
            numbers += acc.gather_for_metrics(model(tokens).sum((1, 2))).tolist()
    assert len(numbers) == 21
    return values(model), numbers


def test_evaluation_needs_no_optimizer_and_counts_every_sample_once(ranks: RankPool) -> None:
    equal_to_ddp(ranks, evaluated)


def twice(ctx: RankContext, config: str) -> tuple[dict[str, Tensor], list[float]]:
    """Everything is prepared again, and after `free_memory` something else is trained."""
    acc = accelerator(config)
    model = transformer()
    model, optimizer, data = acc.prepare(model, adamw(model), loader(16))
    model, optimizer = acc.prepare(model, optimizer)
    numbers = train(acc, model, optimizer, data)
    model, optimizer, data = acc.free_memory(model, optimizer, data)
    assert model is None
    gc.collect()
    assert config == PLAIN or not acc.handles
    model = transformer()
    model, optimizer, data = acc.prepare(model, adamw(model), loader(16))
    assert train(acc, model, optimizer, data) == pytest.approx(numbers)
    return values(model), numbers


def test_preparing_again_changes_nothing_and_freed_memory_is_used_anew(ranks: RankPool) -> None:
    equal_to_ddp(ranks, twice)


def frozen(ctx: RankContext, config: str) -> tuple[dict[str, Tensor], list[float]]:
    acc = accelerator(config)
    model = transformer()
    model.embedding.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    model, optimizer, data = acc.prepare(model, optimizer, loader(16))
    return values(model), train(acc, model, optimizer, data)


def test_frozen_parameters_stay_and_the_others_equal_ddp(ranks: RankPool) -> None:
    equal_to_ddp(ranks, frozen)


@dataclass(frozen=True)
class Settings:
    """What a script might pass through `prepare`."""

    name: str = "mine"


def habits(ctx: RankContext, config: str) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters listed before `prepare`, a model around the prepared one, a cell that is run twice, other objects."""
    accelerator(config, accelerator_gradient_accumulation_steps=2)
    acc = accelerator(config, accelerator_gradient_accumulation_steps=2)
    model = transformer()
    listed = list(model.parameters())
    optimizer = acc.prepare(adamw(model))
    acc.free_memory()
    model, optimizer, data, settings = acc.prepare(model, optimizer, loader(16), Settings())
    assert settings == Settings()
    around, numbers = nn.Sequential(model), []
    for (tokens,) in data:
        with acc.accumulate(around):
            acc.backward(loss_of(around, tokens))
            if acc.sync_gradients:
                numbers += [acc.clip_grad_norm_(listed, 0.3).item(), acc.clip_grad_norm_([], 0.3).item()]
            optimizer.step()
            optimizer.zero_grad()
    return values(model), numbers


def test_habits_of_scripts_work_as_with_ddp(ranks: RankPool) -> None:
    equal_to_ddp(ranks, habits)


def wrapped(ctx: RankContext, options: dict[str, Any]) -> list[str]:
    """The classes of the units of a model."""
    acc = accelerator("mics", **options)
    model = transformer()
    model._no_split_modules = ["Block", "Elsewhere"]
    return [type(unit.module).__name__ for unit in acc.sharded_of(acc.prepare(model)).internals.units]


def _policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return isinstance(module, Block)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"units": Block},
        {"transformer_cls_names_to_wrap": ["Block"]},
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000},
        {"auto_wrap_policy": _policy},
    ],
    ids=["auto", "units", "names", "no_split", "size", "callable"],
)
def test_wrap_policies_choose_the_units(ranks: RankPool, options: dict[str, Any]) -> None:
    assert run(ranks, 2, wrapped, options)[0] == ["Transformer", "Block", "Block", "Block"]


# -- what is refused -----------------------------------------------------------------------------------------


def optimizer_of_two_models(ctx: RankContext) -> None:
    first, second = transformer(), nn.Linear(4, 4)
    optimizer = adamw(nn.ModuleList([first, second]))
    accelerator().prepare(first, second, optimizer)


def optimizer_without_model(ctx: RankContext) -> None:
    model = nn.Linear(4, 4)
    optimizer = accelerator().prepare(adamw(model))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def clipping_of_strangers(ctx: RankContext) -> None:
    acc = accelerator()
    acc.prepare(transformer())
    acc.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)


def other_plugin(ctx: RankContext) -> None:
    accelerator("mics")
    accelerator("zero3")


def no_units_to_recompute(ctx: RankContext) -> None:
    accelerator(activation_checkpointing=True).prepare(nn.Linear(4, 4))


def unknown_class(ctx: RankContext) -> None:
    accelerator(transformer_cls_names_to_wrap=["GPTBlock"]).prepare(transformer())


def stranger(ctx: RankContext) -> None:
    acc = accelerator()
    assert isinstance(acc, MiCSAccelerator)
    acc.sharded_of(nn.Linear(2, 2))


REFUSALS = [
    (optimizer_of_two_models, ConfigError, "parameters"),
    (optimizer_without_model, LifecycleError, r"its model was not.*accelerator\.prepare\(model\)"),
    (clipping_of_strangers, ConfigError, r"belongs to no prepared model.*Pass parameters of prepared models"),
    (other_plugin, ConfigError, "an Accelerator without this `MiCSPlugin`"),
    (no_units_to_recompute, ConfigError, "this model has none.*LlamaDecoderLayer"),
    (unknown_class, ConfigError, r"no module of class GPTBlock\. It has Block"),
    (stranger, LifecycleError, "Linear belongs to no model that was prepared"),
]


@pytest.mark.parametrize(("job", "error", "words"), REFUSALS, ids=[job.__name__ for job, _, _ in REFUSALS])
def test_refused_on_every_rank(ranks: RankPool, job: Any, error: type[MiCSError], words: str) -> None:
    assert_refused(run(ranks, 2, refusal, job), error, words)
