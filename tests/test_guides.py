"""Do the examples and commands of the guides in docs/ run?"""

import contextlib
import dataclasses
import io
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mics_strategy import ShardConfig, cli, shard
from mics_strategy.planner import plan_command, simulate_command
from tests.engine.adapters import base_model
from tests.engine.training import assert_identical
from tests.ranks import RankContext, RankPool

DOCS = Path(__file__).parents[1] / "docs"
CONFIGURATION = (DOCS / "configuration.md").read_text()
GUIDES = {path.stem: path.read_text() for path in DOCS.glob("*.md")}


def blocks(guide: str, language: str = "python") -> list[str]:
    """The code of a guide, block by block."""
    return re.findall(rf"```{language}\n(.*?)```", GUIDES[guide], flags=re.DOTALL)


def example(guide: str, part: str) -> str:
    """The only block of a guide that holds `part`."""
    (block,) = [block for block in blocks(guide) if part in block]
    return block


def run_fabric(ctx: RankContext, code: str) -> None:
    os.chdir(ctx.tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice
        code = code.replace("devices=4", 'accelerator="cpu", devices=4')
        exec(compile(f"import mics_strategy\n{code}", "lightning.md", "exec"), {})
    torch.distributed.destroy_process_group()
    assert torch.load("model.ckpt", weights_only=True)["step"] == 10


def test_the_fabric_example_runs_on_four_ranks(ranks: RankPool) -> None:
    code = example("lightning", "Fabric(")
    assert "device=fabric.device" in code
    ranks(4, run_fabric, code, default_group=False)


def printed_by(ctx: RankContext, code: str) -> str:
    """What a rank prints that runs a script of its own."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "reading.md", "exec"), {})
    torch.distributed.destroy_process_group()
    return printed.getvalue()


def test_the_exercise_of_the_reading_hour_has_the_answer_beside_it(ranks: RankPool) -> None:
    [answer] = blocks("reading", "text")
    assert ranks(4, printed_by, blocks("reading")[0], default_group=False)[0] == answer


def run_twice(ctx: RankContext, code: str, folder: Path) -> list[int]:
    """The steps that a resumed run would still do, after the example has run, before and after it runs again."""
    os.chdir(folder)
    left = []
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        sharded = shard(model, "mics")
        names = {"sharded": sharded, "optimizer": torch.optim.AdamW(model.parameters())}
        exec(compile(code, "checkpoints.md", "exec"), names)
        left.append(10 - names["extra"]["step"])
    return left


def test_the_checkpoint_example_resumes(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, run_twice, example("checkpoints", "save_checkpoint("), tmp_path) == [[10, 0], [10, 0]]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 10


def load_and_save(ctx: RankContext, code: str, folder: Path) -> None:
    os.chdir(folder)
    exec(compile(code, "checkpoints.md", "exec"), {"torch": torch})


def test_the_example_with_weights_from_elsewhere_gives_them_back(ranks: RankPool, tmp_path: Path) -> None:
    base_model().save_pretrained(tmp_path / "pretrained")
    ranks(2, load_and_save, example("checkpoints", "load_weights("), tmp_path)
    loaded, tuned = (load_file(tmp_path / name / "model.safetensors") for name in ("pretrained", "tuned"))
    assert_identical(tuned, loaded)
    assert (tmp_path / "tuned" / "config.json").is_file()


@pytest.mark.slow
def test_the_lightning_example_runs(tmp_path: Path) -> None:
    code = "import mics_strategy\n" + example("lightning", "Trainer(")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)


@pytest.mark.parametrize(("guide", "count"), [("configuration", 4), ("codecs", 6)])
def test_the_configurations_are_valid(guide: str, count: int) -> None:
    (code,) = blocks(guide)
    exec(compile(code, f"{guide}.md", "exec"), {})
    assert code.count("ShardConfig.preset(") == count


@pytest.mark.parametrize("guide", GUIDES)
def test_every_python_block_compiles(guide: str) -> None:
    for block in blocks(guide):
        compile(block, f"{guide}.md", "exec")


@pytest.mark.parametrize("guide", ["getting-started", "recipes", "data"])
def test_an_installation_takes_versions_that_were_tested_together(guide: str) -> None:
    commands = re.findall(r"pip install [^\n`]*\.\[", GUIDES[guide])
    assert commands == ['pip install -c constraints.txt ".[']


PLANNER_COMMANDS = {"plan": plan_command, "simulate": simulate_command}
RECIPE_COMMANDS = ("pretrain", "data", "launch", "fidelity", "report", "export-hf")  # see tests/recipes


def test_every_mics_command_is_one() -> None:
    commands = [
        line.partition(" #")[0]
        for guide in GUIDES
        for block in blocks(guide, "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("mics ") and line.split()[1] not in RECIPE_COMMANDS
    ]
    others = [command for command in commands if command.split()[1] in PLANNER_COMMANDS]
    commands = [command for command in commands if command not in others]
    for command in others:
        PLANNER_COMMANDS[command.split()[1]].parser().parse_args(shlex.split(command)[2:])
    assert {command.split()[1] for command in others} == {*PLANNER_COMMANDS}
    parsed = [cli.parser().parse_args(shlex.split(command)[1:]).command for command in commands]
    assert {*parsed} == {"config", "estimate", "export", "inspect"}


def test_every_preset_it_names_exists() -> None:
    (sentence,) = re.findall(r"`ShardConfig.preset\(...\)` knows (.*?);", CONFIGURATION, flags=re.DOTALL)
    named = set(re.findall(r"`([\w-]+)`", sentence)) - {"paro-XYZ"}
    assert named == {preset for preset in ShardConfig.PRESETS if not preset.startswith("paro")}
    assert sum(preset.startswith("paro") for preset in ShardConfig.PRESETS) == 14


def test_the_table_of_fields_is_that_of_the_class() -> None:
    table = CONFIGURATION.split("## Fields")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(ShardConfig))
