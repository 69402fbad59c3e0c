"""Every shipped recipe: its name, its exact size, its plan for its cluster, its small version."""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest

from recipes import pretrain
from recipes.batch import BatchPlan
from recipes.catalog import CatalogEntry, catalog, catalog_table
from recipes.config import Recipe, load_recipe, recipe_files
from recipes.errors import RecipeError
from recipes.files import ROOT, find_recipe, name_of
from recipes.memory import rank_memory
from recipes.models.build import num_parameters
from recipes.strategy import is_ours, shard_config

FILES = recipe_files(ROOT)
NAMES = [name_of(file) for file in FILES]
EACH = pytest.mark.parametrize("file", FILES, ids=NAMES)
ON_GPUS = [name for name in NAMES if name not in ("llama-demo", "llama-debug")]
PLANNED_FAST = ("bert-base", "bert-10b", "gpt2-20b", "llama-30b", "wide_resnet-3b")
# Published or counted by transformers: MiCS table 1 with its formula, LLaMA, BERT, RoBERTa, GPT-2, TinyLlama.
PARAMETERS = {
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "bert-1.5b-fidelity": 1_530_193_608,
    "bert-10b": 10_081_767_688,
    "bert-15b": 15_038_385_928,
    "bert-20b": 20_329_703_688,
    "bert-50b": 50_269_199_624,
    "roberta-base": 124_697_433,
    "roberta-20b": 19_793_924_185,
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt2-20b": 19_767_628_800,
    "llama-demo": 1_315_968,
    "llama-debug": 164_672,
    "llama-1b": 1_100_048_384,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "wide_resnet-3b": 3_035_509_544,
}
# MiCS section 5.1.1: the smallest partition that trains, in GPUs.
PAPER_PARTITIONS = {"bert-10b": 8, "bert-15b": 16, "bert-20b": 16, "bert-50b": 64, "roberta-20b": 16, "gpt2-20b": 16}


@functools.cache
def load(name: str, *options: str) -> Recipe:
    return load_recipe([f"--config={find_recipe(name)}", *options], has_cuda=False)


def test_the_catalog_is_complete():
    assert sorted(NAMES) == sorted(PARAMETERS)


@pytest.fixture(scope="module")
def listed() -> list[CatalogEntry]:
    """The catalog, built once: on the meta device, every structure as a whole."""
    return catalog()


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_asks_the_engine_for_something_it_has(name: str):
    strategy = load(name).strategy
    assert is_ours(strategy)
    assert shard_config(strategy).partition_size == strategy.shard["partition_size"]


@EACH
def test_a_recipe_is_named_after_its_folder_and_file(file: Path):
    recipe = load(name_of(file))
    assert recipe.name == name_of(file)
    assert recipe.model.family == file.parent.name
    assert find_recipe(recipe.name) == file
    assert find_recipe(str(file)) == file


def test_the_whole_structures_have_the_stated_parameters(listed: list[CatalogEntry]):
    assert {entry.name: entry.parameters for entry in listed} == PARAMETERS
    assert {name: load(name).expected.num_parameters for name in NAMES} == PARAMETERS


@pytest.mark.wide(every=4)
@pytest.mark.parametrize(
    "name", [name if name in PLANNED_FAST else pytest.param(name, marks=pytest.mark.slow) for name in ON_GPUS]
)
def test_the_plan_for_the_cluster_needs_the_stated_memory(name: str):
    recipe = load(name)
    rank_gb = rank_memory(recipe).total_bytes / 1e9
    assert rank_gb == pytest.approx(recipe.expected.rank_gb, abs=0.05)
    assert recipe.expected.fits == (rank_gb <= recipe.cluster.memory_gb)
    if not recipe.expected.fits:
        larger = 2 * recipe.strategy.shard["partition_size"]
        option = f"--strategy.shard.partition_size={larger}"
        repaired_gb = rank_memory(load(name, option)).total_bytes / 1e9
        assert repaired_gb <= recipe.cluster.memory_gb
        assert f"`{option}` does, with {repaired_gb:.1f} GB" in find_recipe(name).read_text()


@pytest.mark.parametrize("name", ON_GPUS)
def test_the_ranks_of_the_cluster_share_the_global_batch(name: str):
    recipe = load(name)
    ranks = recipe.trainer.num_nodes * recipe.cluster.ranks_per_node
    size, micro = recipe.batch.global_size, recipe.batch.micro_size
    plan = BatchPlan(global_size=size, micro_size=micro, world_size=ranks, sequence_length=recipe.sample_size)
    assert f"# {micro} x {plan.accumulation} accumulation x {ranks} ranks = {size:,}" in find_recipe(name).read_text()


@pytest.mark.parametrize("name", PAPER_PARTITIONS)
def test_the_models_of_mics_have_the_papers_partitions_and_batches(name: str):
    recipe = load(name)
    assert recipe.strategy.shard == {"partition_size": PAPER_PARTITIONS[name]}
    assert (recipe.batch.global_size, recipe.batch.micro_size, recipe.data.sequence_length) == (8192, 8, 512)
    assert recipe.model.activation_checkpointing


def test_bert_50b_explains_its_heads():
    assert load("bert-50b").model.num_heads == 64
    with pytest.raises(RecipeError, match=r"num_heads=40.*hidden_size=8192"):
        load("bert-50b", "--model.num_heads=40")
    assert "40 heads, which do not divide the width of 8,192" in find_recipe("bert-50b").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_small_version_is_small_and_of_the_same_kind(name: str):
    whole, small = load(name), load(name, "--ci")
    assert num_parameters(small.model, small.sample_size) < 1_500_000
    assert (small.trainer.accelerator, small.trainer.devices, small.trainer.num_nodes) == ("cpu", 2, 1)
    assert (small.trainer.max_steps, small.data.source in ("grammar", "synthetic_images")) == (2, True)
    for option in ("family", "norm_position", "tie_embeddings", "dropout", "activation_checkpointing", "meta_start"):
        assert getattr(small.model, option) == getattr(whole.model, option)
    assert (small.strategy.name, small.optimizer) == (whole.strategy.name, whole.optimizer)


def test_the_catalog_is_listed_as_json_and_as_a_table(
    listed: list[CatalogEntry], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pretrain, "catalog", lambda: listed)
    pretrain.main(["--list", "--json"])
    entries = json.loads(capsys.readouterr().out)
    assert {entry["name"]: entry["parameters"] for entry in entries} == PARAMETERS
    assert entries[0].keys() == {"name", "family", "parameters", "sequence_length", "global_batch", "data", "cluster"}
    pretrain.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(NAMES) + 1
    (line,) = (line for line in lines if line.startswith("bert-50b "))
    assert line.split()[:6] == ["bert-50b", "bert", "50,269,199,624", "512", "8,192", "wikipedia"]


def test_the_table_of_the_guide_is_the_catalog(listed: list[CatalogEntry]):
    guide = (ROOT.parent / "docs" / "recipes.md").read_text()
    assert f"```text\n{catalog_table(listed)}\n```" in guide


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-8b"], "`llama-8b` is neither a file nor a recipe. Did you mean llama-.*Use one of bert.*--list"),
        (["wide_resnet-3b"], "16 nodes.*without a launcher.*torchrun"),
        (["--list", "--trainer.max_steps=3"], "--list.*--trainer.max_steps=3.*--json"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(arguments: list[str], message: str):
    with pytest.raises(SystemExit, match=message):
        pretrain.main(arguments)


def commands(page: Path) -> list[list[str]]:
    """Arguments of the program in the blocks of a page."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = (line.partition(" #")[0] for block in blocks for line in block.splitlines())
    return [shlex.split(line)[2:] for line in lines if line.startswith("mics pretrain ")]


@pytest.mark.parametrize(
    "page", [ROOT.parent / "docs" / "recipes.md", ROOT / "llama" / "README.md"], ids=lambda p: p.name
)
def test_the_commands_of_the_pages_are_right(page: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT.parent)
    found = commands(page)
    assert len(found) >= 2
    for name, *options in (command for command in found if command[0] != "--list"):
        options = options[: options.index("--plan")] if "--plan" in options else options
        read = [option for option in options if option != "--dry-run"]  # of the program, not of the recipe
        load_recipe([f"--config={find_recipe(name)}", *read], has_cuda=False)
