"""Do others read what is saved, and is what plain data parallel training saved read?"""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import load
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from tests.accelerate.runs import PLAIN, accelerator, assert_same, run, values
from tests.accelerate.test_checkpoints import FORMS, Run, assert_same_end, loaded, uninterrupted
from tests.accelerate.test_training import transformer
from tests.ranks import RankContext, RankPool


def exported(ctx: RankContext, folder: str) -> dict[str, Tensor]:
    job = Run("mics")
    job.steps(0, 2)
    job.acc.save_model(job.model, folder, max_shard_size="8KB")
    state = job.acc.get_state_dict(job.model)
    assert bool(state) == (ctx.rank == 0)
    return values(job.model)


def test_save_model_writes_the_plain_model(ranks: RankPool, tmp_path: Path) -> None:
    expected = run(ranks, 4, exported, str(tmp_path), ranks_per_node=2)[0]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        found.update(load_file(tmp_path / name))
    assert_same({name: found[name] for name in expected}, expected, 0.0)


def saved_by_ddp(ctx: RankContext, folder: str) -> dict[str, Any]:
    job = Run(PLAIN)
    job.steps(0, 2)
    job.acc.save_state(folder)
    return job.end()


def test_a_state_saved_with_ddp_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    expected = run(ranks, 2, saved_by_ddp, str(tmp_path))[0]
    for found in run(ranks, 4, loaded, "mics", FORMS[0], str(tmp_path), ranks_per_node=2):
        assert_same_end(found, expected)


def loaded_by_ddp(ctx: RankContext, folder: str) -> dict[str, Any]:
    model = transformer()
    model.load_state_dict(load(f"{folder}/pytorch_model_fsdp.bin"))
    optimizer = AdamW(model.parameters())
    optimizer.load_state_dict(load(f"{folder}/optimizer.bin"))
    return {"values": values(model), "states": [dict(sorted(each.items())) for each in optimizer.state.values()]}


def test_a_full_state_is_what_plain_torch_reads(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    expected = run(ranks, 4, uninterrupted, "mics", FORMS[1], folder, ranks_per_node=2)[0]["saved"]
    found = run(ranks, 1, loaded_by_ddp, folder)[0]
    assert_same(found["values"], expected["values"], 0.0)
    for own, other in zip(found["states"], expected["states"], strict=True):
        assert_same(own, other, 0.0)


def pretrained(ctx: RankContext, folder: str) -> list[str]:
    """What examples do at their end, and what they must not do."""
    acc = accelerator("mics")
    model = LlamaForCausalLM(LlamaConfig(vocab_size=29, hidden_size=16, intermediate_size=24, num_attention_heads=4))
    model = acc.prepare(model)
    acc.unwrap_model(model).save_pretrained(
        folder, is_main_process=acc.is_main_process, save_function=acc.save, state_dict=acc.get_state_dict(model)
    )
    acc.wait_for_everyone()
    loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()
    return [name for name, value in values(model).items() if not torch.equal(loaded[name], value)]


def test_save_pretrained_as_examples_call_it_writes_the_plain_model(ranks: RankPool, tmp_path: Path) -> None:
    assert run(ranks, 2, pretrained, str(tmp_path)) == [[], []]
