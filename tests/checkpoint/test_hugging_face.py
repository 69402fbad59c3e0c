"""Do models go from a sharded training to transformers and back, bit for bit?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mics_strategy import CheckpointError, LifecycleError, Sharded, load_weights, save_checkpoint, shard
from mics_strategy.checkpoint.export import INDEX, Export, export_safetensors
from mics_strategy.cli import main
from tests.engine.adapters import SIZES
from tests.engine.training import assert_identical, wholes
from tests.ranks import RankContext, RankPool, raises_on_every_rank

ties = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def build(tied: bool, device: str = "cpu") -> tuple[LlamaForCausalLM, Sharded]:
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    return model, shard(model, "mics", units=[LlamaDecoderLayer])


def train_and_save(ctx: RankContext, tied: bool, folder: Path) -> dict[str, Tensor]:
    """One step; then as transformers saves, and as a sharded checkpoint."""
    model, sharded = build(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.arange(12).view(2, 6) + ctx.rank
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    state = sharded.full_state_dict()
    model.save_pretrained(folder / "hf", state_dict=dict(state), max_shard_size="6KB")
    save_checkpoint(folder / "step-1", sharded, [optimizer])
    return state


def saved(ranks: RankPool, tied: bool, folder: Path) -> dict[str, Tensor]:
    """What the trained model was."""
    found: dict[str, Tensor] = ranks(4, train_and_save, tied, folder, ranks_per_node=2)[0]
    return found


def pretrained(folder: Path) -> dict[str, Any]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def load(ctx: RankContext, tied: bool, folder: Path) -> dict[str, Tensor]:
    """Into a model that never was whole."""
    model, sharded = build(tied, "meta")
    load_weights(folder, sharded)
    return wholes(model.state_dict())


@ties
def test_transformers_reads_what_was_trained_and_it_comes_back(ranks: RankPool, tmp_path: Path, tied: bool) -> None:
    expected = saved(ranks, tied, tmp_path)
    assert (tmp_path / "hf" / INDEX).is_file()
    assert_identical(pretrained(tmp_path / "hf"), expected)
    for found in ranks(2, load, tied, tmp_path / "hf"):
        assert_identical(found, expected)
    in_files = {name for file in (tmp_path / "hf").glob("*.safetensors") for name in load_file(file)}
    assert ("lm_head.weight" in in_files) != tied


@ties
def test_transformers_reads_an_exported_checkpoint(ranks: RankPool, tmp_path: Path, tied: bool) -> None:
    expected = saved(ranks, tied, tmp_path)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    command = ["export", str(tmp_path / "step-1"), str(tmp_path / "out"), "--file-gb", "6e-6"]
    assert main([*command, "--config", str(tmp_path / "hf")]) == 0
    settings = {file.name for file in (tmp_path / "out").iterdir() if file.suffix != ".safetensors"}
    assert settings == {INDEX, "config.json", "generation_config.json", "tokenizer.json"}
    assert_identical(pretrained(tmp_path / "out"), expected)
    for found in ranks(2, load, tied, tmp_path / "out"):
        assert_identical(found, expected)


def test_export_copies_one_configuration_and_looks_for_it_first(ranks: RankPool, tmp_path: Path) -> None:
    saved(ranks, False, tmp_path)
    with pytest.raises(CheckpointError, match=r"neither a file nor a folder with `config.json`"):
        export_safetensors(tmp_path / "step-1", Export(folder=tmp_path / "out", config=tmp_path))
    assert not (tmp_path / "out").exists()
    mine = (tmp_path / "hf" / "config.json").rename(tmp_path / "mine.json")
    export_safetensors(tmp_path / "step-1", Export(folder=tmp_path / "out", config=mine))
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def save_shards(ctx: RankContext, folder: Path, is_given: bool) -> None:
    model, _ = build(tied=False)
    model.save_pretrained(folder, **({"state_dict": model.state_dict()} if is_given else {}))


@pytest.mark.parametrize("is_given", [False, True], ids=["its own", "given"])
def test_saving_shards_with_transformers_is_refused_on_every_rank(
    ranks: RankPool, tmp_path: Path, is_given: bool
) -> None:
    raises_on_every_rank(
        lambda: ranks(2, save_shards, tmp_path / "hf", is_given),
        LifecycleError,
        r"`state = sharded.full_state_dict\(\)`",
    )
    assert not (tmp_path / "hf").exists()
