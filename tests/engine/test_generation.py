"""A sharded model of transformers generates the text of the plain one.

Ranks may need different lengths.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from mics_strategy import LifecycleError, shard
from tests.engine.adapters import SIZES
from tests.ranks import RankContext, RankPool, raises_on_every_rank


def llama() -> Any:
    """With more layers than are kept whole from one forward to the next."""
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 5, "use_cache": True})).eval()


def t5() -> Any:
    """Whose encoder `generate` runs by itself."""
    torch.manual_seed(5)
    sizes = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 4, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


def text(model: Any, rank: int) -> Tensor:
    """Of another length on each rank."""
    prompt = torch.tensor([[5, 9, 3 + rank]])
    return model.generate(prompt, max_new_tokens=4 + 5 * rank, do_sample=False, eos_token_id=None)


def generated(ctx: RankContext, build: Callable[[], Any], preset: str) -> Tensor:
    model = build()
    shard(model, preset)
    return text(model, ctx.rank)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@pytest.mark.parametrize("build", [llama, t5])
def test_text_is_that_of_the_plain_model_on_every_rank(ranks: RankPool, build: Any, preset: str) -> None:
    for rank, found in enumerate(ranks(3, generated, build, preset)):
        expected = text(build(), rank)
        assert torch.equal(found, expected)
        assert found.shape[1] > 4 + 5 * rank


def without_cache(ctx: RankContext) -> Tensor:
    model = llama()
    shard(model, "zero3")
    return with_mask(model, ctx.rank)


def with_mask(model: Any, rank: int) -> Tensor:
    """Of another length on each rank, by whole forwards."""
    prompt = torch.tensor([[0, 9, 3 + rank], [5, 7, 4]])
    mask = (prompt != 0).long()
    options = {"use_cache": False, "do_sample": False, "eos_token_id": None}
    return model.generate(prompt, attention_mask=mask, max_new_tokens=3 + 2 * rank, **options)


def test_finished_ranks_continue_without_a_cache(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks(2, without_cache)):
        assert torch.equal(found, with_mask(llama(), rank))


def in_batches(ctx: RankContext) -> None:
    model = llama()
    shard(model, "zero3")
    model.generate_batch([[5, 9, 3]], max_new_tokens=2)


def test_continuous_batching_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: ranks(2, in_batches), LifecycleError, "Continuous batching")
