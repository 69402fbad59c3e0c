"""Exported models: transformers loads them, and their logits are those of the trained model, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from mics_strategy import ShardConfig, save_checkpoint, shard
from recipes.config import Recipe, SampleConfig, StrategyConfig, TrainerConfig
from recipes.data.config import DataConfig
from recipes.data.tokenizer import train_tokenizer
from recipes.errors import RecipeError
from recipes.hf_export import export_checkpoint, export_weights, main
from recipes.models.build import build_model
from recipes.models.config import ModelConfig
from tests.ranks import RankContext, RankPool
from tests.recipes.short_runs import run_debug_recipe

QUIET = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
pytestmark = QUIET
TEXT = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 88, "num_layers": 2, "num_heads": 4}
MODELS = {
    "llama": ModelConfig(**TEXT, num_kv_heads=2, activation_checkpointing=True),
    "llama tied": ModelConfig(**TEXT, tie_embeddings=True),
    "gpt2": ModelConfig(family="gpt2", **TEXT),
    "bert": ModelConfig(family="bert", **TEXT),
    "roberta": ModelConfig(family="roberta", **TEXT, max_positions=20),
    "pre": ModelConfig(family="bert", **TEXT, norm_position="pre"),
}
LENGTH = 16
TEXTS = ["the old king walked to the river . " * 5, "a brave queen found the garden " * 3]


def recipe_of(name: str, **blocks: Any) -> Recipe:
    data, sample = DataConfig(sequence_length=LENGTH), SampleConfig(num_tokens=0)
    return Recipe(name=name, **{"model": MODELS.get(name), "data": data, "sample": sample, **blocks})


def trained(config: ModelConfig) -> Any:
    """A model whose norms and biases are also random."""
    torch.manual_seed(0)
    model = build_model(config, LENGTH).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def tokenizer_of(config: ModelConfig) -> Tokenizer:
    return train_tokenizer(TEXTS, 300, "masked" if config.is_masked else "causal")


def check_logits(name: str, folder: Path) -> Any:
    config = MODELS[name]
    auto = AutoModelForMaskedLM if config.is_masked else AutoModelForCausalLM
    loaded = auto.from_pretrained(folder).eval()
    first = 1 if config.is_masked else 0  # 0 is the padding, which is in no text
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % (300 - first) + first
    assert torch.equal(loaded(input_ids=tokens).logits, trained(config)(input_ids=tokens).logits), name
    return loaded


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_the_trained_model_to_the_bit(name: str, tmp_path: Path):
    config, tokenizer = MODELS[name], tokenizer_of(MODELS[name])
    weights = {f"model.{key}": value for key, value in trained(config).state_dict().items()}
    export_weights(recipe_of(name), weights, tokenizer, tmp_path)
    loaded = check_logits(name, tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert "mics" not in (tmp_path / "config.json").read_text()
    fast = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("the old king").ids
    assert fast("the old king").input_ids == ([1, *ids, 2] if config.is_masked else ids)
    assert fast.model_max_length == LENGTH


def test_a_model_of_16_bits_stays_one(tmp_path: Path):
    model = trained(MODELS["gpt2"]).bfloat16()
    weights = {f"model.module.{name}": value for name, value in model.state_dict().items()}  # DDP under Accelerate
    export_weights(recipe_of("gpt2"), weights, tokenizer_of(MODELS["gpt2"]), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype is torch.bfloat16
    assert torch.equal(loaded.transformer.wte.weight, model.transformer.wte.weight)


class Holder(nn.Module):
    """A module that holds the model as Lightning's does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def save_all(_: RankContext, folder: str, names: tuple[str, ...]) -> None:
    for index, name in enumerate(names):
        model = trained(MODELS[name])
        sharded = shard(model if index % 2 else Holder(model), ShardConfig.preset("mics", partition_size=2))
        save_checkpoint(Path(folder) / name, sharded)


OTHERS = ("llama tied", "gpt2", "bert", "pre")


@pytest.mark.parametrize("names", [("llama", "roberta"), pytest.param(OTHERS, marks=pytest.mark.slow)], ids=len)
def test_sharded_checkpoints_are_exported(names: tuple[str, ...], ranks: RankPool, tmp_path: Path):
    ranks(2, save_all, str(tmp_path), names)
    for name in names:
        folder = tmp_path / f"{name} exported"
        export_checkpoint(recipe_of(name), tmp_path / name, tokenizer_of(MODELS[name]), folder)
        check_logits(name, folder)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_a_run_exports_what_its_checkpoint_holds(
    framework: str, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    options = ("--trainer.export_hf=true", "--trainer.checkpoint_every_steps=100")  # the last step is saved as well
    output = run_debug_recipe(run, cache_dir, *options, framework=framework)
    assert f"The model for transformers is {run / 'hf'}" in output
    loaded = AutoModelForCausalLM.from_pretrained(run / "hf")
    assert AutoTokenizer.from_pretrained(run / "hf").decode([0]) == "<|endoftext|>"
    main([str(run), str(tmp_path / "by command")])
    assert "step=7." in capsys.readouterr().out
    ours, theirs = (load_file(path / "model.safetensors") for path in (run / "hf", tmp_path / "by command"))
    assert ours.keys() == theirs.keys() == loaded.state_dict().keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"strategy": StrategyConfig(name="fsdp")}, r"export_hf=true.*strategy.name=fsdp.*`mics` strategy or `ddp`"),
        (
            {
                "model": ModelConfig(family="wide_resnet", num_classes=1000),
                "data": DataConfig(source="synthetic_images"),
            },
            r"export_hf=true.*family=wide_resnet.*docs/runs.md",
        ),
    ],
    ids=["strategy", "family"],
)
def test_what_cannot_be_exported_is_refused_with_the_recipe(blocks: dict[str, Any], message: str):
    with pytest.raises(RecipeError, match=message):
        recipe_of("llama", trainer=TrainerConfig(export_hf=True), **blocks)


def test_weights_of_another_model_are_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"have no `transformer.wte.weight`; they have a, "):
        export_weights(recipe_of("gpt2"), {"a": torch.zeros(1)}, tokenizer_of(MODELS["gpt2"]), tmp_path)
    weights = trained(MODELS["gpt2"]).state_dict()
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"][:-1]
    with pytest.raises(RecipeError, match=r"`transformer.wte.weight` has the shape \(\d+, \d+\), not .*config.yaml"):
        export_weights(recipe_of("gpt2"), weights, tokenizer_of(MODELS["gpt2"]), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_without_padding_is_refused(tmp_path: Path):
    tokenizer = Tokenizer.from_str(tokenizer_of(MODELS["bert"]).to_str().replace("[PAD]", "[UNUSED]"))
    with pytest.raises(RecipeError, match=r"neither \[PAD\] nor <pad>.*Add one"):
        export_weights(recipe_of("bert"), trained(MODELS["bert"]).state_dict(), tokenizer, tmp_path)


def test_the_command_refuses_with_one_line(tmp_path: Path):
    run, new = tmp_path / "run", tmp_path / "new"
    run.mkdir()
    with pytest.raises(SystemExit, match=r"usage: .*RUN_FOLDER FOLDER"):
        main([str(run)])
    with pytest.raises(SystemExit, match=r"mics export-hf: .*config.yaml does not exist"):
        main([str(run), str(new)])
    (run / "config.yaml").write_text(recipe_of("llama").to_yaml())
    with pytest.raises(SystemExit, match=r"mics export-hf: .*tokenizer.json does not exist"):
        main([str(run), str(new)])
    tokenizer_of(MODELS["llama"]).save(str(run / "tokenizer.json"))
    with pytest.raises(SystemExit, match=r"mics export-hf: .*no checkpoint to export"):
        main([str(run), str(new)])
    with pytest.raises(SystemExit, match=r"mics export-hf: .*is not empty"):
        main([str(run), str(run)])
    images = recipe_of(
        "images", model=ModelConfig(family="wide_resnet", num_classes=1000), data=DataConfig(source="synthetic_images")
    )
    (run / "config.yaml").write_text(images.to_yaml())
    with pytest.raises(SystemExit, match=r"mics export-hf: .*family=wide_resnet.*mics export"):
        main([str(run), str(new)])
    assert not new.exists()
