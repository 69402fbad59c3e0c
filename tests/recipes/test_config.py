"""Every recipe parses, and what cannot be meant is refused before anything runs."""

from pathlib import Path

import pytest

from mics_strategy import ShardConfig, Topology
from mics_strategy.errors import ConfigError
from recipes.config import load_recipe, recipe_files
from recipes.errors import RecipeError
from recipes.strategy import build_strategy, is_ours, shard_config

ROOT = Path(__file__).resolve().parents[2] / "recipes"
FILES = recipe_files(ROOT)
DEMO = f"--config={ROOT / 'llama' / 'demo.yaml'}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_line_of_a_recipe_is_explained(file: Path):
    values = [line for line in file.read_text().splitlines() if ": " in line and not line.startswith("#")]
    assert [line for line in values if "  # " not in line] == []
    assert [line for line in file.read_text().splitlines() if len(line) > 120] == []


def test_every_family_has_its_readme():
    assert [file for file in FILES if not (file.parent / "README.md").is_file()] == []


def test_dotted_overrides_win_over_the_file():
    recipe = load_recipe([DEMO, "--strategy.name=ddp", "--optimizer.lr=1e-4"], has_cuda=False)
    assert (recipe.strategy.name, recipe.optimizer.lr, recipe.batch.global_size) == ("ddp", 1e-4, 8)


def test_options_of_the_shard_config_can_be_overridden_one_by_one():
    recipe = load_recipe([DEMO, "--strategy.shard.partition_size=4"], has_cuda=False)
    assert recipe.strategy.shard == {"partition_size": 4}


def test_a_gpu_takes_the_cuda_block_and_the_command_line_wins_over_it():
    recipe = load_recipe([DEMO, "--model.num_layers=6"], has_cuda=True)
    assert (recipe.model.hidden_size, recipe.model.num_layers) == (512, 6)
    assert (recipe.trainer.precision, recipe.trainer.devices) == ("bf16-mixed", "auto")


def test_the_cpu_accelerator_keeps_the_recipe_as_it_is():
    recipe = load_recipe([DEMO, "--trainer.accelerator=cpu"], has_cuda=True)
    assert (recipe.model.hidden_size, recipe.trainer.devices) == (128, 4)


def test_a_resolved_recipe_reads_back_as_itself(tmp_path: Path):
    recipe = load_recipe([DEMO], has_cuda=False)
    file = tmp_path / "config.yaml"
    file.write_text(recipe.to_yaml())
    assert load_recipe([f"--config={file}"], has_cuda=False) == recipe


def test_print_config_shows_defaults(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        load_recipe([DEMO, "--print_config"], has_cuda=False)
    assert "activation_checkpointing: false" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.hidden=3"], r"`model\.hidden` is no field.*Did you mean `model\.hidden_size`"),
        (
            ["--strategy.partition_size=3"],
            r"`strategy\.partition_size` is no field.*Did you mean `strategy\.shard\.partition_size`\?",
        ),
        (["--tokenizer=gpt2"], r"`tokenizer` is no field.*Did you mean `data\.tokenizer`\?"),
        (["--config={model: {sizee: 3}}"], r"`model\.sizee` is no field"),
        (["--model.hidden_size=wide"], r"`model\.hidden_size` is `wide`.*a whole number or `auto`"),
        (["--strategy.shard=3"], r"`strategy\.shard` is `3`.*a mapping"),
        (["--data.packages=[1]"], r"`data\.packages` is `\[1\]`.*a list of text"),
        (["--data.packages=[os.path]"], r"`data\.packages=os\.path` cannot be used: it must be names .* without dots"),
        (["--optimizer.betas=[0.9]"], r"`optimizer\.betas` is `\[0\.9\]`.*a list of 2 times a number"),
        (["--optimizer.lr=true"], r"`optimizer\.lr` is `True`.*a number"),
        (["--model=3"], r"`model` is `3` instead of a mapping"),
        (["--model.num_layers"], r"`--model\.num_layers` was given without a value"),
        (["--strategy.shard=1", "--strategy.shard.params=2"], r"sets a part of a field that is set as a whole"),
        (["model.num_layers=3"], r"`model\.num_layers=3` is no option"),
        (["--name=a/b"], r"`name=a/b` cannot be used"),
    ],
)
def test_unknown_names_and_wrong_types_are_refused(arguments: list[str], message: str):
    with pytest.raises(RecipeError, match=message):
        load_recipe([DEMO, *arguments], has_cuda=False)


def test_a_value_may_follow_its_option():
    assert load_recipe([DEMO, "--model.num_layers", "6"], has_cuda=False).model.num_layers == 6


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        load_recipe([DEMO, "--help"], has_cuda=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "--data.images.size VALUE height and width. (a whole number; default: 224)" in text
    assert "--model.hidden_size VALUE Width; text families. (a whole number or `auto`; default: auto)" in text
    assert "VALUE (" not in text  # a field without a description


@pytest.mark.parametrize("has_cuda", [False, True])
@pytest.mark.parametrize("block", ["cuda", "ci"])
def test_an_unknown_name_in_a_block_is_found_on_every_machine(block: str, has_cuda: bool, tmp_path: Path):
    file = tmp_path / "wrong.yaml"
    file.write_text(f"name: wrong\n{block}: {{model: {{sizee: 3}}}}\n")
    with pytest.raises(RecipeError, match=rf"`{block}\.model\.sizee` is no field"):
        load_recipe([f"--config={file}"], has_cuda=has_cuda)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch: {micro_batch: 4}", r"`batch\.micro_batch` is no field.*Did you mean `batch\.micro_size`\?"),
        ("ci: {model: {sizee: 3}}", r"`ci\.model\.sizee` is no field"),
        ("trainer: {max_steps: many}", r"`trainer\.max_steps` is `many`"),
    ],
)
def test_an_error_in_a_file_names_the_file(text: str, message: str, tmp_path: Path):
    file = tmp_path / "wrong.yaml"
    file.write_text(f"name: wrong\n{text}\n")
    with pytest.raises(RecipeError, match=rf"^`{file}`: {message}"):
        load_recipe([f"--config={file}"], has_cuda=False)


def test_a_block_has_no_blocks(tmp_path: Path):
    file = tmp_path / "wrong.yaml"
    file.write_text("name: wrong\ncuda: {ci: {}}\n")
    with pytest.raises(RecipeError, match=r"`cuda\.ci` cannot be used"):
        load_recipe([f"--config={file}"], has_cuda=False)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model.num_heads=3", "num_heads=3.*hidden_size=128"),
        ("--model.num_kv_heads=3", "num_kv_heads=3.*num_heads=4"),
        ("--model.vocab_size=100", "vocab_size=100.*257"),
        ("--trainer.max_steps=0", "max_steps=0.*at least 1"),
        ("--data.validation_share=1.5", "validation_share=1.5.*between"),
        ("--batch.micro_size=0", "micro_size=0.*at least 1"),
        ("--trainer.validate_every_steps=0", "validate_every_steps=0.*`never` or at least 1"),
        ("--trainer.checkpoint_every_steps=0", "checkpoint_every_steps=0.*`never` or at least 1"),
        ("--batch.global_tokens=4096", "global_size=8.*global_tokens=4096.*exactly one.*global_size=auto"),
        ("--batch.global_size=auto", "global_size=auto.*global_tokens=auto.*exactly one"),
    ],
)
def test_values_that_cannot_be_used_say_what_to_do(option: str, message: str):
    with pytest.raises(RecipeError, match=message):
        load_recipe([DEMO, option], has_cuda=False)


def test_the_demonstration_asks_the_engine_for_something_it_has_on_gpus():
    strategy = load_recipe([DEMO], has_cuda=True).strategy
    assert is_ours(strategy)
    assert shard_config(strategy).partition_size == strategy.shard["partition_size"]


def test_the_demonstration_imitates_two_nodes():
    assert shard_config(load_recipe([DEMO], has_cuda=False).strategy) == ShardConfig.preset(
        "mics", partition_size=2, topology=Topology(ranks_per_node=2)
    )


def test_presets_are_named_as_in_lightning():
    recipe = load_recipe([DEMO, "--strategy.name=mics_paro_iig"], has_cuda=False)
    assert shard_config(recipe.strategy).optimizer == "world"


def test_an_unknown_field_of_the_shard_config_is_refused():
    with pytest.raises(ConfigError, match=r"Unknown option 'partition'.*partition_size"):
        load_recipe([DEMO, "--strategy.shard.partition=2"], has_cuda=False)


def test_other_strategies_are_left_to_lightning():
    recipe = load_recipe([DEMO, "--strategy.name=ddp"], has_cuda=False)
    assert build_strategy(recipe.strategy) == "ddp"


def test_only_this_projects_strategies_write_sharded_checkpoints():
    recipe = load_recipe([DEMO, "--strategy.name=ddp"], has_cuda=False)
    with pytest.raises(RecipeError, match=r"only `mics` strategies write sharded.*checkpoint_format=full"):
        build_strategy(recipe.strategy, "sharded")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.source=synthetic_images"], "synthetic_images.*family=llama.*reads text"),
        (["--model.meta_start=true", "--strategy.name=ddp"], "meta_start=true.*strategy.name=ddp.*meta_start=false"),
        (["--model.dropout=0.1"], r"dropout=0\.1.*family=llama"),
    ],
)
def test_blocks_that_contradict_each_other_are_refused(options: list[str], message: str):
    with pytest.raises(RecipeError, match=message):
        load_recipe([DEMO, *options], has_cuda=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sample.num_tokens=8"], "num_tokens=8.*family=bert.*num_tokens=0"),
        (["--model.max_positions=256"], "max_positions=256.*sequence_length=512"),
    ],
)
def test_a_masked_model_refuses_what_it_cannot_do(options: list[str], message: str):
    with pytest.raises(RecipeError, match=message):
        load_recipe([f"--config={ROOT / 'bert' / 'base.yaml'}", *options], has_cuda=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.images.num_classes=2000"], "num_classes=2000.*model.num_classes=1000"),
        (["--data.images.channels=1"], "channels=1.*3 for wide_resnet"),
        (["--data.source=grammar"], "source=grammar.*reads images"),
    ],
)
def test_images_have_to_fit_the_network(options: list[str], message: str):
    with pytest.raises(RecipeError, match=message):
        load_recipe([f"--config={ROOT / 'wide_resnet' / '3b.yaml'}", *options], has_cuda=False)


def test_the_ci_block_wins_over_the_cuda_block_and_the_command_line_over_both():
    recipe = load_recipe([DEMO, "--ci", "--trainer.max_steps=7"], has_cuda=True)
    assert (recipe.trainer.accelerator, recipe.trainer.devices, recipe.trainer.max_steps) == ("cpu", 2, 7)
    assert (recipe.model.hidden_size, recipe.data.source) == (128, "grammar")


def test_a_batch_may_be_given_in_tokens():
    tokens = ["--batch.global_size=auto", "--batch.global_tokens=4096"]
    assert load_recipe([DEMO, *tokens], has_cuda=False).global_batch == 4096 // 128
    assert load_recipe([DEMO, *tokens, "--data.sequence_length=64"], has_cuda=False).global_batch == 64
    with pytest.raises(RecipeError, match=r"global_tokens=4096.*sequence_length=96.*global_tokens=4128"):
        load_recipe([DEMO, *tokens, "--data.sequence_length=96"], has_cuda=False)
    with pytest.raises(RecipeError, match=r"global_tokens=4096.*reads images.*global_size=256"):
        load_recipe([f"--config={ROOT / 'wide_resnet' / '3b.yaml'}", *tokens], has_cuda=False)


def test_a_recipe_without_a_ci_block_says_so(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text("name: own\n")
    with pytest.raises(RecipeError, match=r"--ci.* recipe `own` has no block `ci`"):
        load_recipe([f"--config={file}", "--ci"], has_cuda=False)
