"""On what do the Trainers of TRL run on a rank of the pool?

A vocabulary of numbers, a small model in a folder, from which TRL reads reference models itself, and datasets of a few
texts. How they are launched stands in `trainer_runs.py`.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast, Trainer
from transformers.utils.logging import disable_progress_bar
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.utils import create_reference_model

from tests.accelerate.trainer_runs import VOCABULARY, llama, options_of_training

disable_progress_bars()
disable_progress_bar()
BASE = "base"
NUM_TEXTS, NUM_EVALUATED = 20, 7


def written_base(rank: int) -> None:
    """Let rank 0 write the model before training, which stops generating at many tokens. Collective."""
    if rank == 0:
        model = llama()
        model.generation_config.update(eos_token_id=[2, *range(4, 10)], use_cache=True)
        model.save_pretrained(BASE)
    dist.barrier()


def tokenizer() -> PreTrainedTokenizerFast:
    """Of which every number below the size of the vocabulary is a token."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{str(index): index for index in range(3, VOCABULARY)}}
    made = Tokenizer(WordLevel(words, unk_token="3"))
    made.pre_tokenizer = Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "3"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def texts(num: int, longest: int, seed: int) -> list[str]:
    """Random numbers; each text of another length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (num,), generator=generator).tolist()
    return [" ".join(map(str, torch.randint(4, VOCABULARY, (n,), generator=generator).tolist())) for n in lengths]


def data(**longest: int) -> dict[str, Any]:
    """What a Trainer is given: columns of texts of at most so many numbers, and their tokenizer."""

    def columns(num: int) -> Dataset:
        return Dataset.from_dict({name: texts(num, most, seed) for seed, (name, most) in enumerate(longest.items())})

    return {
        "train_dataset": columns(NUM_TEXTS),
        "eval_dataset": columns(NUM_EVALUATED),
        "processing_class": tokenizer(),
    }


def settings(**options: Any) -> dict[str, Any]:
    """Of a short training with an evaluation."""
    usual = {"bf16": False, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    return options_of_training(**usual | options)


def lora(is_adapted: bool) -> LoraConfig | None:
    """An adapter that is not nothing from the start, and always the same."""
    if not is_adapted:
        return None
    torch.manual_seed(5)
    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return LoraConfig(r=3, lora_alpha=12, **options)


def sft(folder: Path | str, *, adapted: bool = False, completes: bool = False, **options: Any) -> Trainer:
    """On texts, or on the completions of prompts only."""
    return SFTTrainer(
        model=LlamaForCausalLM.from_pretrained(BASE),
        args=SFTConfig(folder, **settings(**options)),
        peft_config=lora(adapted),
        **data(**{"prompt": 5, "completion": 6} if completes else {"text": 9}),
    )


def dpo(folder: Path | str, *, adapted: bool = False, reference: str = "implicit", **options: Any) -> Trainer:
    """With a reference that TRL reads from the model's folder, an adapter without itself, or one that is given."""
    model = LlamaForCausalLM.from_pretrained(BASE)
    given: dict[str, nn.Module] = {}
    if reference == "another":
        given = {"ref_model": llama(initializer_range=0.3)}
    elif reference == "copied":
        given = {"ref_model": create_reference_model(model, num_shared_layers=2)}
    return DPOTrainer(
        model=model,
        args=DPOConfig(folder, **settings(**options)),
        peft_config=lora(adapted),
        **given,
        **data(prompt=5, chosen=6, rejected=6),
    )


def reward(folder: Path | str, **options: Any) -> Trainer:
    """With a new head."""
    return RewardTrainer(
        model=_scoring(seed=3),
        args=RewardConfig(folder, **settings(**options)),
        **data(chosen=6, rejected=6),
    )


def grpo(folder: Path | str, *, adapted: bool = False, judged: bool = False, **options: Any) -> Trainer:
    """With a function that gives rewards, and maybe a model; `made.generated` tells how long texts became."""
    generated: list[int] = []

    def sum_of_tokens(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        generated.append(max(map(len, completion_ids)))
        return [float(sum(int(word) % 5 for word in completion.split())) for completion in completions]

    made = GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(BASE),
        reward_funcs=[sum_of_tokens, _scoring(seed=4)] if judged else sum_of_tokens,
        reward_processing_classes=[None, tokenizer()] if judged else None,
        args=GRPOConfig(
            folder,
            num_generations=2,
            max_completion_length=8,
            **settings(**{"beta": 0.1, "eval_strategy": "no"} | options),
        ),
        peft_config=lora(adapted),
        **data(prompt=5),
    )
    made.generated = generated
    return made


def _scoring(seed: int) -> LlamaForSequenceClassification:
    torch.manual_seed(seed)
    return LlamaForSequenceClassification.from_pretrained(BASE, num_labels=1, pad_token_id=0)
