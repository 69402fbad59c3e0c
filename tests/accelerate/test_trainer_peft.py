"""Does `transformers.Trainer` train, save and resume an adapter of `peft` on a sharded model?"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from tests.accelerate.runs import PLAIN, assert_same, run
from tests.accelerate.trainer_runs import (
    FULL,
    SHARDED,
    arguments,
    assert_same_logs,
    launched,
    llama,
    logs,
    trainer,
    values,
)
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.slow

SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


Outcome = tuple[list[dict[str, float]], dict[str, Tensor]]


def adapted(**options: Any) -> nn.Module:
    """With a dropout of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        lora = LoraConfig(r=3, lora_alpha=12, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], **options)
        return get_peft_model(llama(), lora)


def trained(config: str, kind: str, folder: str, resumed: str | None = None, **options: Any) -> Outcome:
    """Logs without the mean of the whole run, and parameters; leaves the adapter in `folder`."""
    with launched(config, state_dict_type=kind):
        made = trainer(adapted(), arguments(folder, **SAVING | options))
        made.train(resume_from_checkpoint=resumed)
        made.save_model(f"{folder}/final")
        dist.barrier()
        return logs(made)[:-1], values(made.model)


def assert_same_outcome(found: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    assert_same_logs(found[0], expected[0], tolerance)
    assert_same(found[1], expected[1], tolerance)


def saved_and_resumed(ctx: RankContext, kind: str) -> None:
    expected = trained(PLAIN, FULL, "ddp")
    found = trained("mics", kind, "whole")
    assert_same_outcome(found, expected)
    assert_same_outcome(trained("mics", kind, "resumed", "whole/checkpoint-2"), found, 0.0)
    loaded = PeftModel.from_pretrained(llama(), "whole/final", is_trainable=True)
    assert_same(values(loaded), found[1], 0.0)


@pytest.mark.parametrize("kind", [SHARDED, FULL])
def test_an_adapter_trains_as_with_ddp_and_is_saved_and_resumed_exactly(ranks: RankPool, kind: str) -> None:
    run(ranks, 4, saved_and_resumed, kind, ranks_per_node=2)


def from_files_of_peft(ctx: RankContext) -> None:
    """What peft writes: by DDP with an optimizer beside it, and by itself."""
    expected = trained(PLAIN, FULL, "ddp")
    assert_same_outcome(trained("mics", SHARDED, "after-ddp", "ddp/checkpoint-2"), expected)
    options = {"save_only_model": True}
    trained("mics", FULL, "only", **options)
    assert sorted(path.name for path in Path("only/checkpoint-2").glob("*.bin")) == ["training_args.bin"]
    expected = trained(PLAIN, FULL, "ddp-resumed", "only/checkpoint-2", **options)
    assert_same_outcome(trained("mics", FULL, "resumed", "only/checkpoint-2", **options), expected)


def test_an_adapter_goes_on_from_files_of_peft_as_with_ddp(ranks: RankPool) -> None:
    run(ranks, 4, from_files_of_peft, ranks_per_node=2)


def best(ctx: RankContext) -> None:
    options = {"load_best_model_at_end": True, "learning_rate": 0.05}
    assert_same_outcome(trained("mics", SHARDED, "best", **options), trained(PLAIN, FULL, "ddp", **options), 1e-4)


def test_the_best_adapter_is_loaded_at_the_end(ranks: RankPool) -> None:
    run(ranks, 4, best, ranks_per_node=2)


def generated(ctx: RankContext) -> None:
    """Ranks end after different numbers of tokens."""
    found = []
    for config in (PLAIN, "mics"):
        with launched(config):
            made = trainer(adapted(), arguments("out"))
            made.train()
            made.model.eval()
            options = {"do_sample": False, "use_cache": True, "eos_token_id": None}
            prompt = torch.tensor([[5, 9, 3]])
            found.append(made.model.generate(input_ids=prompt, max_new_tokens=4 + ctx.rank, **options))
    assert found[0].shape == (1, 7 + ctx.rank)
    assert torch.equal(found[0], found[1])


def test_an_adapted_model_generates_as_a_plain_one(ranks: RankPool) -> None:
    run(ranks, 4, generated, ranks_per_node=2)
