"""Do the Trainers of TRL, unchanged, train sharded models as they train plain ones?"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trl.models.utils
from torch import Tensor
from transformers import LlamaForCausalLM, Trainer
from transformers.trainer_callback import PrinterCallback
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from mics_strategy import ConfigError
from tests.accelerate.runs import PLAIN, assert_same, run
from tests.accelerate.trainer_runs import FULL, SHARDED, assert_same_logs, launched, llama, logs, values
from tests.accelerate.trl_runs import BASE, dpo, grpo, reward, sft, written_base
from tests.ranks import RankContext, RankPool, raises_on_every_rank

pytestmark = pytest.mark.slow

Make = Callable[..., Trainer]
Outcome = tuple[list[dict[str, float]], dict[str, Tensor]]


def trained(made: Trainer, resumed: str | None = None) -> Outcome:
    """Logs and parameters."""
    made.remove_callback(PrinterCallback)
    made.train(resume_from_checkpoint=resumed)
    return logs(made), values(made.model)


def assert_same_outcome(found: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    assert_same_logs(found[0], expected[0], tolerance)
    assert_same(found[1], expected[1], tolerance)


def compared(ctx: RankContext, make: Make, configs: list[Any], options: dict[str, Any]) -> None:
    written_base(ctx.rank)
    with launched(PLAIN):
        expected = trained(make("ddp", **options))
    for config in configs:
        with launched(config):
            made = make("out", **options)
            assert_same_outcome(trained(made), expected)
            assert type(made.accelerator).__name__ == "MiCSAccelerator"


FINE_TUNING: dict[str, dict[str, Any]] = {
    "packed texts": {"packing": True, "max_length": 16},
    "completions only, logits in chunks": {"completes": True, "loss_type": "chunked_nll"},
    "an adapter": {"adapted": True},
}


def test_fine_tuning_equals_ddp_in_every_layout(ranks: RankPool) -> None:
    run(ranks, 4, compared, sft, ["mics", "zero3", "zero1"], {}, ranks_per_node=2)


@pytest.mark.parametrize("options", FINE_TUNING.values(), ids=FINE_TUNING)
def test_fine_tuning_equals_ddp_with(ranks: RankPool, options: dict[str, Any]) -> None:
    run(ranks, 2, compared, sft, ["mics"], options)


def test_autocast_over_fp32_gathers_is_that_of_ddp(ranks: RankPool) -> None:
    """On two ranks, whose sums have no order."""
    run(ranks, 2, compared, dpo, [{"preset": "zero3", "param_dtype": "float32"}], {"bf16": True})


IN_16_BITS: list[tuple[Make, dict[str, Any]]] = [
    (sft, {}),
    (sft, {"completes": True, "loss_type": "chunked_nll"}),
    (sft, {"adapted": True, "gradient_checkpointing": True}),
    (dpo, {}),
    (dpo, {"reference": "another"}),
    (reward, {}),
    (grpo, {}),
]


def in_16_bits(ctx: RankContext, make: Make, options: dict[str, Any]) -> tuple[float, float]:
    """First losses of DDP under autocast, and of parameters that are gathered in 16 bits."""
    written_base(ctx.rank)
    losses = []
    for config in (PLAIN, "zero3"):
        with launched(config):
            made = make("out", **{"bf16": True, "max_steps": 2, "eval_strategy": "no", **options})
            losses.append(trained(made)[0][0]["loss"])
    return losses[0], losses[1]


@pytest.mark.wide(every=2)
@pytest.mark.parametrize(("make", "options"), IN_16_BITS)
def test_parameters_in_16_bits_begin_as_autocast_of_ddp_does(
    ranks: RankPool, make: Make, options: dict[str, Any]
) -> None:
    for expected, loss in run(ranks, 2, in_16_bits, make, options):
        assert loss == pytest.approx(expected, rel=0.03, abs=0.01)


PREFERENCES: dict[str, dict[str, Any]] = {
    "a reference read from the model's folder": {},
    "another model that follows": {
        "reference": "another",
        **{"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    },
    "a copy that shares layers": {"reference": "copied"},
    "an adapter": {"adapted": True},
}


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("options", PREFERENCES.values(), ids=PREFERENCES)
def test_preferences_are_learnt_as_with_ddp_against(ranks: RankPool, options: dict[str, Any]) -> None:
    run(ranks, 2, compared, dpo, ["mics"], options)


def reference(ctx: RankContext) -> None:
    written_base(ctx.rank)
    tokens = torch.arange(4, 16).view(2, 6)
    plain = llama(initializer_range=0.3)
    with launched("mics"), torch.no_grad():
        made = dpo("out", reference="another")
        assert made.accelerator.handle_of(made.ref_model) is not None
        held = sum(parameter.to_local().numel() for parameter in made.ref_model.parameters())
        assert held < 0.6 * sum(parameter.numel() for parameter in plain.parameters())
        assert not made.ref_model.training
        torch.testing.assert_close(made.ref_model(tokens).logits, plain(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_reference_model_is_sharded_as_the_model_is(ranks: RankPool) -> None:
    run(ranks, 2, reference)


def test_rewards_are_learnt_as_with_ddp(ranks: RankPool) -> None:
    run(ranks, 2, compared, reward, ["mics"], {})


def policies(ctx: RankContext, options: dict[str, Any]) -> None:
    """Texts are drawn at random and end at different lengths: ranks wait for each other, and draw nothing meanwhile."""
    written_base(ctx.rank)
    with launched(PLAIN):
        made = grpo("ddp", **options)
        expected = trained(made)
        lengths: list[list[int]] = [[] for _ in range(ctx.world_size)]
        dist.all_gather_object(lengths, made.generated)
        assert any(len(set(together)) > 1 for together in zip(*lengths, strict=True))
    with launched("mics"):
        again = grpo("out", **options)
        assert_same_outcome(trained(again), expected)
        assert again.generated == made.generated


POLICIES: dict[str, dict[str, Any]] = {
    "a function and a model that judge": {"judged": True},
    "an adapter, two passes over each text": {"adapted": True, "num_iterations": 2},
}


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_policies_generate_and_learn_as_with_ddp_with(ranks: RankPool, options: dict[str, Any]) -> None:
    run(ranks, 4, policies, options, ranks_per_node=2)


def weights_for_vllm(made: Trainer) -> dict[str, Tensor]:
    """What TRL sends to vLLM, which is not needed for that."""
    sender = object.__new__(VLLMGeneration)
    sender.model, sender.accelerator = made.accelerator.unwrap_model(made.model), made.accelerator
    sender._dist = DistributedBackend(made.accelerator)
    return {name: value.detach().clone() for name, value in sender._iter_named_params()}


def sent_to_vllm(ctx: RankContext, adapted: bool) -> None:
    """With an adapter: merged meanwhile."""
    written_base(ctx.rank)
    found = {}
    for config in (PLAIN, "mics"):
        with launched(config):
            made = grpo("out", adapted=adapted, max_steps=1)
            _, before = trained(made)
            found[config] = weights_for_vllm(made)
            assert_same(values(made.model), before, 1e-6)
    assert_same(found["mics"], found[PLAIN], 1e-5)


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapter"])
def test_weights_that_trl_sends_to_vllm_are_those_of_ddp(ranks: RankPool, adapted: bool) -> None:
    run(ranks, 2, sent_to_vllm, adapted)


def saved_and_resumed(ctx: RankContext) -> None:
    """A resumed training counts its tokens anew, with DDP too."""
    written_base(ctx.rank)
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "eval_strategy": "no"}
    for kind in (SHARDED, FULL):
        with launched("mics", state_dict_type=kind):
            found = trained(sft(kind, **options))
            made = sft(f"resumed-{kind}", **options)
            again = trained(made, f"{kind}/checkpoint-1")
            for entry in (*found[0], *again[0]):
                entry.pop("num_tokens", None)
            assert_same_outcome((again[0][:-1], again[1]), (found[0][:-1], found[1]), 0.0)
            made.save_model(f"final-{kind}")
            dist.barrier()
        assert_same(values(LlamaForCausalLM.from_pretrained(f"final-{kind}")), found[1], 0.0)


def test_fine_tuning_resumes_exactly_and_leaves_what_from_pretrained_loads(ranks: RankPool) -> None:
    run(ranks, 2, saved_and_resumed)


def with_layers_by_size(ctx: RankContext, config: str) -> None:
    written_base(ctx.rank)
    with launched(config, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params="300"):
        trained(sft("out", loss_type="chunked_nll"))


@pytest.mark.parametrize("config", ["mics", "zero1"])
def test_an_output_layer_that_would_not_be_gathered_is_refused(ranks: RankPool, config: str) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, with_layers_by_size, config), ConfigError, "in the unit `lm_head`")


def of_others(ctx: RankContext) -> None:
    written_base(ctx.rank)
    with launched("mics"):
        dpo("out")
    plugin = SimpleNamespace(fsdp_version=0)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    trl.models.utils.prepare_fsdp(LlamaForCausalLM.from_pretrained(BASE), accelerator)


def test_models_of_other_plugins_are_prepared_by_trl(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, of_others), ValueError, "FSDP version 0 is not supported")
