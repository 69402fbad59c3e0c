"""Does a model generate, within a Trainer's evaluation and after it, as a plain one does?

Ranks that hold shards wait for each other in every forward, and stop generating at different lengths.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, Trainer

from tests.accelerate.runs import PLAIN, assert_same, run
from tests.accelerate.trainer_runs import (
    VOCABULARY,
    arguments,
    assert_same_logs,
    launched,
    llama,
    logs,
    options_of_training,
    trainer,
    values,
)
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.slow


class GeneratesInEvaluation(Trainer):
    """With a number of tokens that differs by rank."""

    generated: tuple[Tensor, ...] = ()

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
        num_new = 3 + torch.distributed.get_rank()
        prompt = inputs["input_ids"][:, :3]
        found = model.generate(prompt, max_new_tokens=num_new, do_sample=False, use_cache=True, eos_token_id=None)
        self.generated = (*self.generated, found)
        return super().prediction_step(model, inputs, *args, **options)


def generated(ctx: RankContext) -> None:
    """Before, within and after a training."""
    found = {}
    for config in (PLAIN, "mics"):
        with launched(config):
            args = arguments("out", eval_strategy="steps", eval_steps=2)
            trainer(llama(), args, GeneratesInEvaluation).evaluate()
            made = trainer(llama(), args, GeneratesInEvaluation)
            made.train()
            made.evaluate()
            found[config] = made.generated, logs(made)
    expected, expected_logs = found.pop(PLAIN)
    assert len({tokens.shape for tokens in expected}) == 1
    for own, own_logs in found.values():
        assert len(own) == len(expected)
        assert all(torch.equal(tokens, others) for tokens, others in zip(own, expected, strict=True))
        assert_same_logs(own_logs, expected_logs)


def test_text_of_any_length_is_generated_in_evaluations_as_with_ddp(ranks: RankPool) -> None:
    run(ranks, 4, generated, ranks_per_node=2)


def t5() -> T5ForConditionalGeneration:
    """Its encoder runs past the forward of the model; its embedding is the root's and tied."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def sum_of_tokens(predicted: Any) -> dict[str, float]:
    return {"sum": float(np.maximum(predicted.predictions, 0).sum())}


def translated(ctx: RankContext) -> None:
    found = {}
    for config in (PLAIN, "mics"):
        with launched(config):
            options = {"eval_strategy": "steps", "eval_steps": 2, "generation_max_length": 6, "max_steps": 4}
            options["ddp_find_unused_parameters"] = True  # a bias of positions is not used
            args = Seq2SeqTrainingArguments("out", predict_with_generate=True, **options_of_training(**options))
            made = trainer(t5(), args, Seq2SeqTrainer, compute_metrics=sum_of_tokens)
            made.train()
            found[config] = logs(made), values(made.model), made.predict(made.eval_dataset).predictions
    expected_logs, expected, tokens = found.pop(PLAIN)
    assert tokens.shape[0] >= 13
    for own_logs, own, own_tokens in found.values():
        assert_same_logs(own_logs, expected_logs)
        assert_same(own, expected, 1e-5)
        np.testing.assert_array_equal(own_tokens, tokens)


def test_an_encoder_decoder_is_evaluated_by_generating_as_with_ddp(ranks: RankPool) -> None:
    run(ranks, 4, translated, ranks_per_node=2)
