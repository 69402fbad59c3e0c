"""Does `transformers.Trainer`, unchanged, train sharded models as it trains plain ones?"""

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

from mics_strategy import ConfigError, LifecycleError
from tests.accelerate.runs import PLAIN, assert_same, run
from tests.accelerate.trainer_runs import (
    SHARDED,
    Sequences,
    arguments,
    assert_same_logs,
    launched,
    llama,
    logs,
    trainer,
    values,
)
from tests.ranks import RankContext, RankPool, raises_on_every_rank


class OwnLoss(Trainer):
    """With a loss that the model does not know."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = outputs.logits.float().square().mean() + outputs.logits[:, :, 3].mean()
        return (loss, outputs) if return_outputs else loss


class TooSmall(Trainer):
    """On a device that holds three sequences: the fourth fits only at first."""

    num_calls = 0

    def compute_loss(self, model: nn.Module, inputs: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, **options)
        self.num_calls += 1
        if model.training and len(inputs["input_ids"]) > 3 and self.num_calls > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return loss


class OwnOptimizer(Trainer):
    """As transformers advises where an optimizer cannot be passed."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.optimizer


AUTOCAST = {"preset": "zero3", "param_dtype": "float32"}  # over fp32 gathers, which is what DDP computes
CLASSES = {cls.__name__: cls for cls in (Trainer, OwnLoss, TooSmall, OwnOptimizer)}
Outcome = dict[str, Any]


def trained(config: Any, options: dict[str, Any]) -> Outcome:
    """Trained with evaluations, then asked for predictions.

    Args:
        config: As `launched` takes it.
        options: Of `TrainingArguments`, and `sizes`, `variables`, `cls`, `times`.
    """
    options = {"eval_strategy": "steps", "eval_steps": 2, **options}
    sizes, variables = options.pop("sizes", {}), options.pop("variables", {})
    cls, times = CLASSES[options.pop("cls", "Trainer")], options.pop("times", 1)
    with launched(config, **variables):
        made = trainer(llama(**sizes), arguments("out", **options), cls)
        found = []
        for _ in range(times):
            made.train()
            found += logs(made)
        predicted = torch.from_numpy(made.predict(made.eval_dataset).predictions)
        assert type(made.accelerator).__name__ == ("Accelerator" if config == PLAIN else "MiCSAccelerator")
        return {"logs": found, "predicted": predicted, "values": values(made.model)}


def assert_same_outcome(found: Outcome, expected: Outcome) -> None:
    assert_same_logs(found["logs"], expected["logs"])
    assert_same(found["values"], expected["values"], 1e-5)
    torch.testing.assert_close(found["predicted"], expected["predicted"], rtol=1e-4, atol=1e-5)


def compared(ctx: RankContext, configs: list[Any], options: dict[str, Any]) -> None:
    expected = trained(PLAIN, {**options, "variables": {}})
    for config in configs:
        assert_same_outcome(trained(config, options), expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "no clipping": {"max_grad_norm": 0},
    "a loss of one's own": {"cls": "OwnLoss"},
    "tied embeddings": {"sizes": {"tie_word_embeddings": True}},
    "recomputation by transformers": {"gradient_checkpointing": True},
    "recomputation by units": {"variables": {"activation_checkpointing": "true"}},
    "means over each rank's tokens": {"average_tokens_across_devices": False},
    "memory for smaller batches": {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "cls": "TooSmall"},
}


@pytest.mark.slow
def test_logs_predictions_and_values_equal_those_of_ddp_in_every_layout(ranks: RankPool) -> None:
    configs = ["mics", "zero3", "zero1", {"preset": "mics", "partition_size": 4}]
    run(ranks, 4, compared, configs, {}, ranks_per_node=2)


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_equals_ddp_with(ranks: RankPool, options: dict[str, Any]) -> None:
    run(ranks, 2, compared, ["mics"], options)


LOW_PRECISION: dict[str, dict[str, Any]] = {
    "autocast": {},
    "recomputation by units": {"variables": {"activation_checkpointing": "true"}},
    "recomputation by transformers": {"gradient_checkpointing": True},
}


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("options", LOW_PRECISION.values(), ids=LOW_PRECISION)
def test_bf16_equals_autocast_of_ddp_with(ranks: RankPool, options: dict[str, Any]) -> None:
    """On two ranks, whose sums have no order: bf16 makes differences of anything else."""
    run(ranks, 2, compared, [AUTOCAST, {**AUTOCAST, "preset": "zero1"}], {"bf16": True, **options})


@pytest.mark.slow
def test_a_second_training_goes_on_as_with_ddp(ranks: RankPool) -> None:
    run(ranks, 2, compared, ["zero3"], {"times": 2})


def evaluated_first(ctx: RankContext) -> None:
    """The plain one is trained by another Trainer: after an evaluation, transformers leaves DDP out."""
    with launched(PLAIN):
        before = trainer(llama(), arguments("out")).evaluate()["eval_loss"]
    expected = trained(PLAIN, {"bf16": False, "eval_strategy": "no"})
    with launched("mics"):
        made = trainer(llama(), arguments("out"))
        assert made.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-6)
        made.train()
        assert_same_logs(logs(made), expected["logs"])
        assert_same(values(made.model), expected["values"], 1e-5)


@pytest.mark.slow
def test_evaluating_before_training_changes_nothing(ranks: RankPool) -> None:
    run(ranks, 2, evaluated_first)


def several_models(ctx: RankContext) -> list[Any]:
    """`model_init` makes a model for each training."""
    found = []
    for config in (PLAIN, "zero3"):
        with launched(config):
            data = Sequences(10 * ctx.world_size)
            made = Trainer(model_init=lambda: llama(), args=arguments("out", num_train_epochs=1), train_dataset=data)
            made.remove_callback(PrinterCallback)
            made.train()
            made.train()
            found.append((logs(made), values(made.model)))
    return found


@pytest.mark.slow
def test_a_model_made_for_each_training_equals_ddp(ranks: RankPool) -> None:
    for plain, own in run(ranks, 2, several_models):
        assert_same_logs(own[0], plain[0])
        assert_same(own[1], plain[1], 1e-5)


def another_trainer(ctx: RankContext) -> None:
    """For the model of one that has trained, with more than the first was asked for."""
    found = {}
    for config in (PLAIN, AUTOCAST):
        with launched(config):
            first = trainer(llama(), arguments("first", bf16=True, num_train_epochs=1))
            first.train()
            second = trainer(first.model, arguments("second", bf16=True, eval_strategy="steps", eval_steps=2))
            second.train()
            found[str(config)] = logs(second), values(second.model)
    assert_same_logs(found[str(AUTOCAST)][0], found[PLAIN][0])
    assert_same(found[str(AUTOCAST)][1], found[PLAIN][1], 1e-5)


@pytest.mark.slow
def test_another_trainer_goes_on_with_the_model_as_with_ddp(ranks: RankPool) -> None:
    run(ranks, 2, another_trainer)


def sharded_otherwise(ctx: RankContext) -> None:
    args = {"num_train_epochs": 1}
    with launched("zero3"):
        first = trainer(llama(), arguments("first", **args))
        first.evaluate()
    with launched("zero1", activation_checkpointing="true"):
        trainer(first.model, arguments("second", **args)).train()


def test_another_trainer_that_would_shard_otherwise_is_refused(ranks: RankPool) -> None:
    message = (
        "with params=world, grads=world, activation_checkpointing=False, and cannot be sharded again with "
        "params=replicate"
    )
    raises_on_every_rank(lambda: run(ranks, 2, sharded_otherwise), ConfigError, message)


# -- in words of others ----------------------------------------------------------------------------------------


def described(ctx: RankContext, fsdp_config: dict[str, Any]) -> Any:
    """What a plugin of FSDP that the Trainer makes comes to; trains as it would without."""
    expected = trained("zero3", {})
    assert_same_outcome(trained("zero3", {"fsdp": True, "fsdp_config": fsdp_config}), expected)
    with launched("zero3"):
        plugin = trainer(llama(), arguments("out", fsdp=True, fsdp_config=fsdp_config)).accelerator.state.fsdp_plugin
        return plugin.state_dict_type.name, plugin.transformer_cls_names_to_wrap, plugin.activation_checkpointing


def test_fsdp_config_is_read_where_it_means_the_same(ranks: RankPool) -> None:
    layers = ["LlamaDecoderLayer"]
    config = {"transformer_layer_cls_to_wrap": layers, "activation_checkpointing": True, "state_dict_type": SHARDED}
    assert run(ranks, 2, described, config) == 2 * [(SHARDED, layers, True)]


def refused(ctx: RankContext, options: dict[str, Any]) -> None:
    trained("zero3", options)


REFUSED = {
    "offloading": (
        {"fsdp": True, "fsdp_config": {"cpu_offload": True}},
        ConfigError,
        "cpu_offload.*Offloading is not available",
    ),
    "keeping": ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, ConfigError, "params: replicate"),
    "Adafactor": ({"optim": "adafactor"}, ConfigError, "Adafactor needs whole tensors"),
    "evaluation in bf16": ({"bf16_full_eval": True}, LifecycleError, "cannot become torch.bfloat16"),
}


@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_offered_is_refused_on_every_rank(
    ranks: RankPool, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, refused, options), error, message)


def with_own_optimizer(ctx: RankContext) -> None:
    with launched("mics"):
        model = llama()
        trainer(model, arguments("out"), optimizers=(torch.optim.AdamW(model.parameters()), None))


def test_optimizers_that_are_passed_are_refused_by_transformers(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, with_own_optimizer), RuntimeError, "Passing `optimizers` is not allowed")


@pytest.mark.slow
def test_an_optimizer_made_by_a_subclass_trains_as_with_ddp(ranks: RankPool) -> None:
    run(ranks, 2, compared, ["mics"], {"cls": "OwnOptimizer"})


def scaled(config: Any, folder: str, resumed: str | None = None, max_grad_norm: float = 1.0) -> Any:
    """With the scaler that fp16 has on GPUs, whose first steps overflow; Accelerate makes none on CPUs."""
    with launched(config):
        options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 3, "max_grad_norm": max_grad_norm}
        made = trainer(llama(), arguments(folder, fp16=True, **options))
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
        made.accelerator.native_amp = True
        made.train(resume_from_checkpoint=resumed)
        return logs(made)[:-1], values(made.model), made.accelerator.scaler.state_dict()


def fp16(ctx: RankContext) -> None:
    expected = scaled(PLAIN, "ddp")
    norms = [entry["grad_norm"] for entry in expected[0]]
    assert 0 < sum(not math.isfinite(norm) for norm in norms) < len(norms) - 2
    found = scaled(AUTOCAST, "whole")
    # Norms that are summed in another order clip by 1e-7 more or less, which fp16 rounds to 1e-4 within some steps.
    assert_same_logs(found[0][:4], expected[0][:4], 1e-6)
    assert found[2] == expected[2]
    expected, unclipped = (scaled(config, "unclipped", max_grad_norm=1e6) for config in (PLAIN, AUTOCAST))
    assert_same_logs(unclipped[0], expected[0], 1e-6)
    assert_same(unclipped[1], expected[1], 1e-6)
    assert unclipped[2] == expected[2]
    resumed = scaled(AUTOCAST, "resumed", "whole/checkpoint-3")
    assert_same_logs(resumed[0], found[0], 0.0)
    assert resumed[2] == found[2]


def test_fp16_skips_steps_as_with_ddp_and_resumes_its_scale(ranks: RankPool) -> None:
    run(ranks, 2, fp16)


def sent_in_the_last_step(ctx: RankContext) -> Any:
    """Of two micro-steps, as all are."""
    with launched("mics"):
        made = trainer(llama(), arguments("out", max_steps=2))
        made.train()
        return made.accelerator.sharded_of(made.model).traffic()


def test_gradients_cross_nodes_once_a_step(ranks: RankPool) -> None:
    for rows in run(ranks, 4, sent_in_the_last_step, ranks_per_node=2):
        assert [row.sent_bytes for row in rows] == [row.planned_bytes for row in rows]
        counts = {(row.axis, row.collective): row.count for row in rows}
        assert counts["intra_node", "reduce_scatter"] == 2 * counts["inter_node", "all_reduce"] > 0
