"""How does `transformers.Trainer` run on a rank of the pool?

What the launcher would say stands in environment variables while a Trainer is made and used; without them it trains
with Accelerate's plain data parallel training, which is the truth here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from tests.accelerate.runs import PLAIN, forget, full

VOCABULARY = 31
OF_TIME = ("runtime", "per_second", "epoch", "preparation_time", "step_time")
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


class Sequences(Dataset):
    """Tokens to be continued."""

    def __init__(self, num: int, seed: int = 0) -> None:
        """`num` sequences."""
        self.tokens = torch.randint(3, VOCABULARY, (num, 6), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        """How many."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One, which is its own label.

        Except for the first token: old versions of transformers count it in the mean of the loss.
        """
        labels = self.tokens[index].clone()
        labels[0] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def llama(**options: Any) -> LlamaForCausalLM:
    """A small one, always the same."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,  # more than an engine keeps gathered
        "num_attention_heads": 2,
        "initializer_range": 0.2,
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return LlamaForCausalLM(LlamaConfig(**sizes | options))


@contextmanager
def launched(config: Any, **variables: str) -> Iterator[None]:
    """As ``accelerate launch`` would start a script.

    Args:
        config: A preset or a mapping, as ``fsdp_sharding_strategy`` has it; `PLAIN` for data parallel training.
        **variables: More variables, as ``fsdp_<name>`` of its file.
    """
    before = dict(os.environ)
    forget()
    if config != PLAIN:
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="mics", FSDP_SHARDING_STRATEGY=str(config))
        os.environ.setdefault("FSDP_STATE_DICT_TYPE", SHARDED)
        os.environ.update({f"FSDP_{name.upper()}": value for name, value in variables.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget()


def options_of_training(**options: Any) -> dict[str, Any]:
    """Of a short training: five batches of two sequences an epoch, two of which make a step."""
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,
        "logging_steps": 1,
        "ddp_find_unused_parameters": False,
        **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "log_level": "error", "use_cpu": True},
    }
    return usual | options


def arguments(output: Path | str, **options: Any) -> TrainingArguments:
    """Those, and where to."""
    return TrainingArguments(output_dir=str(output), **options_of_training(**options))


def trainer(
    model: nn.Module, args: TrainingArguments, cls: type[Trainer] = Trainer, *, num: int | None = None, **options: Any
) -> Trainer:
    """With five batches for each rank, and an evaluation that does not divide by the ranks."""
    num = 10 * int(os.environ["WORLD_SIZE"]) if num is None else num
    made = cls(model=model, args=args, train_dataset=Sequences(num), eval_dataset=Sequences(13, seed=1), **options)
    made.remove_callback(PrinterCallback)
    return made


def logs(of: Trainer) -> list[dict[str, float]]:
    """What was logged, but for times."""
    return [{k: v for k, v in entry.items() if not k.endswith(OF_TIME)} for entry in of.state.log_history]


def values(model: nn.Module) -> dict[str, Tensor]:
    """The plain parameters under plain names, on every rank. Collective."""
    prefixes = ("module.", "_orig_mod.")
    found = {}
    for name, parameter in model.named_parameters():
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        found[name] = full(parameter)
    return found


def assert_same_logs(found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float = 1e-5) -> None:
    """The same keys and, but for rounding, values."""
    assert len(expected) > 0
    assert len(found) == len(expected)
    for own, plain in zip(found, expected, strict=True):
        assert own.keys() == plain.keys()
        for name, value in plain.items():
            approximately = pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True)
            assert own[name] == approximately, f"{name}: {own} against {plain}"
