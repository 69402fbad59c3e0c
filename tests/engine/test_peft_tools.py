"""Tools of `peft` on a sharded model.

Switching adapters off, merging, saving, loading, counting.
"""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mics_strategy import ConfigError, LifecycleError, ShardConfig, shard
from tests.engine.adapters import (
    dora,
    ia3,
    lora,
    lora_and_a_trained_head,
    lora_on_tied_embeddings,
    lora_that_begins,
)
from tests.engine.adapters import two_adapters_by_step as two_adapters
from tests.engine.training import (
    OPTIMIZERS,
    Run,
    Training,
    assert_identical,
    assert_same,
    plain,
    start,
    whole,
)
from tests.models import Case
from tests.ranks import RankContext, RankPool, raises_on_every_rank

STEPS = 3
EVALUATION = 9  # a step whose batches no training sees


def _name(value: Any) -> str:
    return getattr(value, "__name__", str(value))


SETTINGS = [
    (lora, "mics"),
    (dora, "zero3"),
    (dora, "zero1"),
    *((lora, preset) for preset in ("zero2", "paro-iig", "paro-nni")),
    *((lora_and_a_trained_head, preset) for preset in ("ddp", "zero3", "mics", "paro-ini")),
]
cases = pytest.mark.parametrize("case", [lora, lora_and_a_trained_head, dora], ids=_name)


def _run(case: Any, preset: str = "mics") -> Run:
    return Run(case=case, config=ShardConfig.preset(preset), steps=STEPS)


def _trained(ctx: RankContext, run: Run, steps: int = 2) -> Training:
    training = start(ctx, run)
    for step in range(steps):
        training.step(step)
    return training


def _plain(run: Run, world_size: int, steps: int = 2) -> Any:
    """The plain model after so many steps."""
    model = run.case().build()
    model.load_state_dict(plain(run.replace(steps=steps), world_size).parameters, strict=False)
    return model


def _evaluate(training: Training) -> float:
    with torch.no_grad():
        return training.loss(EVALUATION).item()


def _plain_loss(case: Case, model: nn.Module, rank: int) -> float:
    with torch.no_grad():
        return case.loss(model, case.batch(EVALUATION, 0, rank)).item()


def _continue(training: Training) -> dict[str, Tensor]:
    training.step(STEPS - 1)
    return training.parameters()


def evaluate_without_adapter(ctx: RankContext, run: Run) -> tuple[float, float, dict[str, Tensor]]:
    """Losses without the adapter and with it, and the parameters one step later."""
    training = _trained(ctx, run)
    model: Any = training.model
    model.eval()
    with model.disable_adapter():
        without = _evaluate(training)
    with_adapter = _evaluate(training)
    model.train()
    return without, with_adapter, _continue(training)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(("case", "preset"), SETTINGS, ids=_name)
def test_evaluation_without_the_adapter_is_plain_and_changes_nothing(ranks: RankPool, case: Any, preset: str) -> None:
    run = _run(case, preset)
    model = _plain(run, 4)
    for rank, found in enumerate(ranks(4, evaluate_without_adapter, run, ranks_per_node=2)):
        with model.disable_adapter():
            without = _plain_loss(case(), model, rank)
        with_adapter = _plain_loss(case(), model, rank)
        assert abs(without - with_adapter) > 1e-3
        assert found[:2] == pytest.approx((without, with_adapter), rel=1e-5)
        assert_same(found[2], plain(run, 4).parameters)


def merge_and_unmerge(ctx: RankContext, run: Run) -> tuple[float, dict[str, Tensor]]:
    """The loss with the merged adapter, and parameters one step after unmerging."""
    training = _trained(ctx, run)
    model: Any = training.model
    model.merge_adapter()
    loss = _evaluate(training)
    model.unmerge_adapter()
    return loss, _continue(training)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(("case", "preset"), SETTINGS, ids=_name)
def test_a_merged_adapter_evaluates_as_plain_and_can_be_taken_out(ranks: RankPool, case: Any, preset: str) -> None:
    run = _run(case, preset)
    model = _plain(run, 4)
    for rank, (loss, parameters) in enumerate(ranks(4, merge_and_unmerge, run, ranks_per_node=2)):
        assert loss == pytest.approx(_plain_loss(case(), model, rank), rel=1e-5)
        assert_same(parameters, plain(run, 4).parameters)


def merged_state(ctx: RankContext, run: Run) -> dict[str, Tensor]:
    training = _trained(ctx, run)
    model: Any = training.model
    model.merge_and_unload()
    return training.sharded.full_state_dict()


@cases
def test_full_state_dict_after_merging_is_that_of_the_plain_merged_model(ranks: RankPool, case: Any) -> None:
    run = _run(case)
    state, *rest = ranks(4, merged_state, run, ranks_per_node=2)
    expected = _plain(run, 4).merge_and_unload().state_dict()
    assert_same({name.removeprefix("base_model.model."): value for name, value in state.items()}, expected)
    assert rest == [{}] * 3


def save_adapter(ctx: RankContext, run: Run, folder: Path) -> dict[str, Tensor]:
    """On rank 0, in both ways, from the whole state."""
    training = _trained(ctx, run)
    model: Any = training.model
    state = training.sharded.full_state_dict()
    if ctx.rank:
        return {}
    model.save_pretrained(str(folder), state_dict=state)
    return get_peft_model_state_dict(model, state_dict=state)


@pytest.mark.parametrize("case", [lora, lora_and_a_trained_head, dora, ia3], ids=_name)
def test_adapter_in_the_full_state_dict_is_the_plain_adapter(ranks: RankPool, case: Any, tmp_path: Path) -> None:
    run = _run(case, "paro-iig")
    adapter = ranks(4, save_adapter, run, tmp_path, ranks_per_node=2)[0]
    expected = get_peft_model_state_dict(_plain(run, 4))
    assert_same(adapter, expected)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert_identical({name: saved[name] for name in adapter}, adapter)


def load_adapter(ctx: RankContext, run: Run, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """After loading, and one step later; the model was trained on other steps before."""
    training = start(ctx, run)
    training.step(7)
    model: Any = training.model
    model.load_adapter(str(folder), "default", is_trainable=True)
    loaded = training.parameters()
    training.optimizer = OPTIMIZERS[run.optimizer]([p for p in model.parameters() if p.requires_grad])
    return loaded, _continue(training)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("preset", ["mics", "ddp", "zero1", "zero3"])
def test_a_saved_adapter_is_loaded_into_shards(ranks: RankPool, preset: str, tmp_path: Path) -> None:
    run = _run(lora_and_a_trained_head, preset).replace(optimizer="sgd")
    ranks(4, save_adapter, run, tmp_path, ranks_per_node=2)
    for loaded, continued in ranks(4, load_adapter, run, tmp_path, ranks_per_node=2):
        assert_same(loaded, plain(run.replace(steps=2), 4).parameters)
        assert_same(continued, plain(run, 4).parameters)


def counted(ctx: RankContext, run: Run) -> str:
    model: Any = start(ctx, run).model
    return _printed(model)


def _printed(model: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        model.print_trainable_parameters()
    return out.getvalue()


@pytest.mark.parametrize("preset", ["ddp", "mics"])
def test_count_of_trainable_parameters_is_the_plain_one(ranks: RankPool, preset: str) -> None:
    expected = _printed(lora_and_a_trained_head().build())
    assert "trainable params: 1,360 ||" in expected
    assert ranks(4, counted, _run(lora_and_a_trained_head, preset), ranks_per_node=2) == [expected] * 4


def train_from_meta(ctx: RankContext, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Base and adapter on the meta device, with values from a plain state dict."""
    case = run.case()
    with torch.device("meta"):
        model = case.build()
    assert all(parameter.is_meta for parameter in model.parameters())
    sharded = shard(model, run.config, units=case.units)
    sharded.load_full_state_dict(case.build().state_dict())
    optimizer = OPTIMIZERS[run.optimizer]([p for p in model.parameters() if p.requires_grad])
    training = Training(run, ctx, case, model, sharded, optimizer)
    loaded = training.parameters()
    for step in range(run.steps):
        training.step(step)
    return loaded, training.parameters()


@pytest.mark.parametrize("case", [lora_on_tied_embeddings, lora_and_a_trained_head], ids=_name)
def test_a_meta_model_that_loads_a_plain_state_trains_as_plain(ranks: RankPool, case: Any) -> None:
    run = _run(case, "paro-iig")
    for loaded, trained in ranks(4, train_from_meta, run, ranks_per_node=2):
        assert_identical(loaded, {name: p.detach() for name, p in case().build().named_parameters()})
        assert_same(trained, plain(run, 4).parameters)


def begin_on_meta(ctx: RankContext, beginning: Any) -> tuple[list[float], list[float]]:
    """The largest elements of the two sides of each adapter."""
    with torch.device("meta"):
        model = lora_that_begins(beginning).build()
    shard(model, "mics", units=[LlamaDecoderLayer])
    found = {name: whole(p).abs().max().item() for name, p in model.named_parameters() if "lora_" in name}
    return [v for name, v in found.items() if "lora_A" in name], [v for name, v in found.items() if "lora_B" in name]


@pytest.mark.parametrize("beginning", [True, "gaussian"])
def test_an_adapter_on_meta_starts_without_effect(ranks: RankPool, beginning: Any) -> None:
    for of_a, of_b in ranks(2, begin_on_meta, beginning):
        assert min(of_a) > 0
        assert max(of_b) == 0


def test_an_adapter_initialized_from_base_weights_is_refused_on_meta(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(2, begin_on_meta, "olora"), ConfigError, "initialized from the base weights.*'olora'"
    )


def generate(ctx: RankContext, run: Run) -> Tensor:
    training = _trained(ctx, run)
    return _generated(training.model)


def _generated(model: Any) -> Tensor:
    model.eval()
    return model.generate(input_ids=torch.tensor([[5, 9, 3]]), max_new_tokens=6, do_sample=False, use_cache=True)


@pytest.mark.parametrize("units", [(LlamaDecoderLayer,), (LlamaForCausalLM, LlamaDecoderLayer)])
@pytest.mark.parametrize("preset", ["ddp", "mics"])
def test_text_is_generated_as_plain_by_the_model_inside(ranks: RankPool, preset: str, units: Any) -> None:
    """`generate` runs the inner model without the forward of the adapter's wrapper."""
    run = _run(lora_and_a_trained_head, preset).replace(units=units)
    expected = _generated(_plain(run, 2))
    assert expected.numel() > 4
    assert all(torch.equal(found, expected) for found in ranks(2, generate, run))


def add_adapter(ctx: RankContext, run: Run) -> None:
    training = _trained(ctx, run, steps=1)
    model: Any = training.model
    model.add_adapter("late", model.peft_config["default"])
    training.loss(1)


def test_an_adapter_that_comes_after_sharding_is_refused(ranks: RankPool) -> None:
    message = "q_proj.lora_A.late.weight.*was added.*Change the model first"
    raises_on_every_rank(lambda: ranks(2, add_adapter, _run(lora)), LifecycleError, message)


def activate_frozen_adapter(ctx: RankContext, run: Run) -> None:
    case = run.case()
    model: Any = case.build()
    model.set_adapter("default")
    shard(model, run.config, units=case.units)
    model.set_adapter("other")
    case.loss(model, {**case.batch(0, 0, 0), "adapter": "other"})


def test_activating_an_adapter_that_was_frozen_is_refused(ranks: RankPool) -> None:
    message = "lora_A.other.weight.*was frozen when the model was sharded"
    raises_on_every_rank(lambda: ranks(2, activate_frozen_adapter, _run(two_adapters)), LifecycleError, message)
