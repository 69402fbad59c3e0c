"""What `--dry-run` says, without ranks, GPUs or text."""

import importlib.util
from pathlib import Path

import pytest

from recipes import pretrain
from recipes.config import Recipe, load_recipe, recipe_files
from recipes.dry_run import dry_run
from recipes.files import ROOT, find_recipe, name_of
from recipes.memory import planned_machines, rank_memory

NAMES = [name_of(file) for file in recipe_files(ROOT)]
FAST = ("llama-debug", "llama-7b")
EACH = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def load(name: str, *options: str) -> Recipe:
    return load_recipe([f"--config={find_recipe(name)}", *options], has_cuda=False)


def no_data(*_: object, **__: object) -> None:
    raise AssertionError("a dry run prepares no data")


@pytest.mark.parametrize("name", EACH)
def test_every_recipe_is_planned_for_its_machines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(pretrain, "prepare", no_data)
    folders = (f"--data.cache_dir={tmp_path / 'cache'}", f"--trainer.output_dir={tmp_path / 'run'}")
    pretrain.main([name, "--dry-run", *folders])
    report, recipe = capsys.readouterr().out, load(name)
    machines = planned_machines(recipe)
    for words in (
        f"{recipe.name}: {recipe.model.family}, {recipe.expected.num_parameters:,} parameters",
        f"{machines.world_size} ranks, {machines.ranks_per_node} on a node",
        f"{recipe.batch.micro_size} micro batch x ",
        f"{recipe.trainer.max_steps:,} steps: ",
        f"step {recipe.trainer.max_steps:,}: ",
        "sent by a rank in one optimizer step of ",
        "not prepared on this machine" if not recipe.model.reads_images else "nothing to prepare",
        "nothing was started; the run starts from the beginning",
    ):
        assert report.count(words) == 1, words
    if recipe.cluster.memory_gb:
        (total,) = (line for line in report.splitlines() if line.startswith("  total") and " of " in line)
        assert float(total.split()[1]) == pytest.approx(recipe.expected.rank_gb, abs=0.05)
        assert total.endswith("GB: fits" if recipe.expected.fits else "GB: does NOT fit")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_bytes_are_those_of_the_papers_arithmetic():
    recipe = load("bert-10b")
    memory, accumulation, numel = rank_memory(recipe), 8, recipe.expected.num_parameters
    plan = memory.engine.plan(accumulation)
    gathers = 2 * accumulation * 2 * numel * 7 / 8  # 2 bytes, twice per micro-step, over the 8 ranks of a partition
    reductions = accumulation * 4 * numel * 7 / 8  # 4 bytes, once per micro-step
    assert plan.sent_bytes("intra_node") == pytest.approx(gathers + reductions, rel=0.02)
    second_hop = 2 * 4 * numel / 8 * 15 / 16  # of the shard over 16 nodes, once per optimizer step
    assert plan.sent_bytes("inter_node") == pytest.approx(second_hop, rel=0.02)
    assert memory.engine.plan(2 * accumulation).sent_bytes("inter_node") == plan.sent_bytes("inter_node")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama-7b", ["--batch.global_size=1000", "--trainer.devices=8"], r"global_size=1000.*128 ranks"),
        ("llama-7b", ["--trainer.framework=accelerate", "--trainer.precision=bf16-true"], r"bf16-true.*accelerate"),
        ("llama-debug", ["--strategy.name=micz"], r"strategy\.name=micz` is no strategy .* Did you mean `mics`"),
        ("llama-debug", ["--data.source=text", "--data.path=nowhere"], r"data\.path=nowhere` does not exist"),
        ("llama-debug", ["--trainer.loggers=[wandb]"], r"package `wandb` is not installed.*pip install wandb"),
        ("llama-debug", ["--strategy.name=deepspeed_stage_3"], r"package `deepspeed`.* Run `pip install deepspeed`"),
        ("llama-debug", ["--trainer.output_dir=/etc/passwd/run"], r"`/etc/passwd/run` cannot be used: a folder is"),
        ("llama-debug", ["--data.cache_dir=/etc/passwd/data"], r"`/etc/passwd/data` cannot be used: a folder is"),
    ],
    ids=["batch", "precision", "strategy", "path", "logger", "deepspeed", "folder", "cache"],
)
def test_a_dry_run_refuses_what_a_run_refuses(
    name: str, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    find = importlib.util.find_spec
    absent = ("wandb", "deepspeed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package in absent else find(package))
    monkeypatch.setenv("MASTER_ADDR", "a launcher's")
    given = [name, f"--trainer.output_dir={tmp_path}", f"--data.cache_dir={tmp_path}", *options]
    refusals = []
    for dry in (["--dry-run"], []):
        with pytest.raises(SystemExit, match=message) as ended:
            pretrain.main([*given, *dry])
        refusals.append(ended.value.code)
    assert refusals[0] == refusals[1]
    assert list(tmp_path.iterdir()) == []


def test_what_ranks_refuse_when_they_shard_is_refused_before():
    with pytest.raises(SystemExit, match="partition_size"):
        pretrain.main(["llama-7b", "--dry-run", "--strategy.shard.partition_size=7"])


def test_a_plan_for_other_machines_says_what_a_run_here_would_be_refused_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(pretrain, "_LAUNCHERS", ())
    given = ["llama-7b", "--trainer.num_nodes=2", f"--trainer.output_dir={tmp_path}"]
    with pytest.raises(SystemExit, match="The recipe is for 2 nodes") as refused:
        pretrain.main(given)
    pretrain.main([*given, "--dry-run"])
    report = capsys.readouterr().out
    assert f"Started like this, it would be {str(refused.value).replace('mics pretrain', 'refused')}" in report
    assert "planned for 16 ranks, 8 on a node (nodes: 2); the recipe is meant for AMSP: A800 80 GB, 16 nodes" in report


def test_ranks_of_a_launcher_are_refused_as_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = ["llama-debug", "--trainer.devices=4", f"--trainer.output_dir={tmp_path}"]
    for dry in (["--dry-run"], []):
        with pytest.raises(SystemExit, match=r"The recipe is for 4 ranks .* launcher started 2"):
            pretrain.main([*given, *dry])


def test_the_strategy_is_told_with_the_fields_that_the_recipe_sets():
    assert "strategy mics (partition_size=8, params=replicate, grads=replicate), " in dry_run(load("llama-7b"))


def test_the_device_of_the_memory_is_said():
    on_cpus = "this recipe is for CPUs, where staging buffers and workspaces are larger"
    for name, is_for_cpus in (("llama-debug", True), ("llama-7b", False)):
        report = dry_run(load(name))
        assert ("memory of a rank on a GPU" in report, on_cpus in report) == (True, is_for_cpus)


def test_other_strategies_have_no_plan():
    assert "`strategy.name=ddp` is not planned by this project" in dry_run(load("llama-demo", "--strategy.name=ddp"))
