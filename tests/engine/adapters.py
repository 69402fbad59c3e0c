"""Models with adapters of `peft`.

Each function returns a `Case`, as those of `tests.models`: a small Llama, frozen, with a few parameters that train.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.models import Batch, Case

VOCABULARY = 61
QUERY_AND_VALUE = ["q_proj", "v_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,  # ten times the usual one, so that adapters get gradients to compare
    "use_cache": False,
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}


def base_model(dtype: torch.dtype = torch.float32, **sizes: Any) -> LlamaForCausalLM:
    """Without an adapter."""
    return LlamaForCausalLM(LlamaConfig(**SIZES, **sizes)).to(dtype)


def _batch(step: int, micro: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1_000_003 * step + 1_009 * micro + rank)
    return {"input_ids": torch.randint(3, VOCABULARY, (2, 5), generator=generator)}


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, labels=batch["input_ids"]).loss


def _case(adapter: PeftConfig, *, dtype: torch.dtype = torch.float32, **sizes: Any) -> Case:
    def build() -> nn.Module:
        return get_peft_model(base_model(dtype, **sizes), adapter)

    return Case(build=_seeded(build), batch=_batch, loss=_loss, units=(LlamaDecoderLayer,))


def _seeded(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing.* is deprecated", FutureWarning)
            torch.default_generator.manual_seed(11)
            return make()

    return build


def _lora(modules: list[str] = QUERY_AND_VALUE, **options: Any) -> LoraConfig:
    return LoraConfig(r=3, lora_alpha=12, lora_dropout=0.0, target_modules=modules, **options)


def lora() -> Case:
    return _case(_lora())


def lora_that_begins(beginning: bool | str) -> Case:
    return _case(_lora(init_lora_weights=beginning))


def lora_on_tied_embeddings() -> Case:
    return _case(_lora(), tie_word_embeddings=True)


def lora_on_everything() -> Case:
    """Embedding and head too, which belong to the root.

    In float64: so many products in a row round too much.
    """
    adapter = _lora([*QUERY_AND_VALUE, "gate_proj", "embed_tokens", "lm_head"])
    return _case(adapter, dtype=torch.float64)


def lora_and_a_trained_head() -> Case:
    """A trainable copy of the head beside the frozen one."""
    return _case(_lora(modules_to_save=["lm_head"]))


def lora_and_a_trained_tied_head() -> Case:
    return _case(_lora(modules_to_save=["lm_head"], ensure_weight_tying=True), tie_word_embeddings=True)


def lora_and_biases() -> Case:
    return _case(_lora(bias="lora_only"), attention_bias=True)


def lora_on_bfloat16() -> Case:
    """The base is frozen in bfloat16; `peft` keeps its adapters in float32."""
    return _case(_lora(), dtype=torch.bfloat16)


def lora_on_parameters() -> Case:
    """An adapter of parameters instead of modules.

    `peft` writes into the adapters between their uses.
    """
    return _case(LoraConfig(r=3, lora_alpha=12, target_parameters=["mlp.gate_proj.weight"]))


def dora() -> Case:
    """Reads the weights of the base, and its own, outside of their modules' forwards."""
    return _case(_lora(use_dora=True))


def ia3() -> Case:
    return _case(IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]))


def prompt() -> Case:
    """Trains an embedding of the wrapper around the model only."""
    return _case(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def lora_with_recomputation() -> Case:
    def build() -> nn.Module:
        model = lora().build()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        return model

    return replace(lora(), build=_seeded(build))


def lora_against_its_base() -> Case:
    """A forward of the base between forward and backward of the adapted model.

    This is the loop of preference training.

    In float64: the squares are large.
    """

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        adapted = _loss(model, batch)
        with torch.no_grad(), model.disable_adapter():
            base = _loss(model, batch)
        return adapted + 10 * (adapted - base).square()

    return replace(_case(_lora(modules_to_save=["lm_head"]), dtype=torch.float64), loss=loss)


def _two_adapters(turn: Callable[[int, int], int]) -> Case:
    """Two adapters, both trainable, of which one is active in a micro-step."""

    def build() -> nn.Module:
        model: Any = lora().build()
        model.add_adapter("other", _lora(["q_proj", "down_proj"]))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        return model

    def batch(step: int, micro: int, rank: int) -> Batch:
        return {"adapter": ("default", "other")[turn(step, micro) % 2], **_batch(step, micro, rank)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        model.set_adapter(batch["adapter"])
        return _loss(model, {"input_ids": batch["input_ids"]})

    return Case(build=_seeded(build), batch=batch, loss=loss, units=(LlamaDecoderLayer,))


def two_adapters_by_step() -> Case:
    return _two_adapters(lambda step, micro: step)


def two_adapters_by_micro_step() -> Case:
    return _two_adapters(lambda step, micro: micro)
