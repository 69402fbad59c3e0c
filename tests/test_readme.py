"""Does everything in the README that can be run, run?"""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mics_strategy import ShardConfig, shard
from tests.engine.adapters import base_model
from tests.engine.training import assert_identical, forget_meshes
from tests.ranks import RankContext, RankPool

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run_block(ctx: RankContext, code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_the_plain_example_runs_on_four_ranks(ranks: RankPool) -> None:
    (example,) = [block for block in PYTHON_BLOCKS if "init_process_group" in block]
    ranks(4, run_block, example, default_group=False)


def run_fabric(ctx: RankContext, code: str) -> None:
    os.chdir(ctx.tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice
        exec(compile(code.replace("devices=4", 'accelerator="cpu", devices=4'), "README.md", "exec"), {})
    torch.distributed.destroy_process_group()
    assert torch.load("model.ckpt", weights_only=True)["step"] == 10


def test_the_fabric_example_runs_on_four_ranks(ranks: RankPool) -> None:
    (example,) = [block for block in PYTHON_BLOCKS if "Fabric(" in block]
    ranks(4, run_fabric, example, default_group=False)


def run_twice(ctx: RankContext, code: str, folder: Path) -> list[int]:
    """The steps that a resumed run would still do, after the example has run, before and after it runs again."""
    os.chdir(folder)
    left = []
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        sharded = shard(model, "mics")
        names = {"sharded": sharded, "optimizer": torch.optim.AdamW(model.parameters())}
        exec(compile(code, "README.md", "exec"), names)
        left.append(10 - names["extra"]["step"])
    return left


def test_what_the_training_examples_make_is_on_the_models_device() -> None:
    made = [call for block in PYTHON_BLOCKS for call in re.findall(r"torch\.randn\((.*)\)\)\.square", block)]
    assert len(made) == 2
    assert all(re.search(r"device=(sharded|fabric)\.device", arguments) for arguments in made)


def test_the_checkpoint_example_resumes(ranks: RankPool, tmp_path: Path) -> None:
    (example,) = [block for block in PYTHON_BLOCKS if "save_checkpoint(" in block]
    assert ranks(2, run_twice, example, tmp_path) == [[10, 0], [10, 0]]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 10


def load_and_save(ctx: RankContext, code: str, folder: Path) -> None:
    forget_meshes()
    os.chdir(folder)
    exec(compile(code, "README.md", "exec"), {"torch": torch})


def test_the_example_with_weights_from_elsewhere_gives_them_back(ranks: RankPool, tmp_path: Path) -> None:
    (example,) = [block for block in PYTHON_BLOCKS if "load_weights(" in block]
    base_model().save_pretrained(tmp_path / "pretrained")
    ranks(2, load_and_save, example, tmp_path)
    loaded, tuned = (load_file(tmp_path / name / "model.safetensors") for name in ("pretrained", "tuned"))
    assert_identical(tuned, loaded)
    assert (tmp_path / "tuned" / "config.json").is_file()


@pytest.mark.slow
def test_the_lightning_example_runs(tmp_path: Path) -> None:
    (example,) = [block for block in PYTHON_BLOCKS if "Trainer(" in block]
    subprocess.run([sys.executable, "-c", example], check=True, cwd=tmp_path, timeout=55, capture_output=True)


def test_its_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert commands == ["demo", "test"]
    assert all(re.search(rf"^{command}:", makefile, flags=re.MULTILINE) for command in commands)
    (config,) = re.findall(r"--config (\S+)", makefile)
    assert (ROOT / config).is_file()


def test_continuous_integration_runs_the_same_test_command() -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"time make test", "make test-slow", "make lint"} <= set(commands)


def test_every_preset_it_names_exists() -> None:
    (sentence,) = re.findall(r"`ShardConfig.preset\(...\)` knows (.*?);", README, flags=re.DOTALL)
    named = set(re.findall(r"`(\w+)`", sentence))
    assert named == {preset for preset in ShardConfig.PRESETS if not preset.startswith("paro")}
    assert sum(preset.startswith("paro") for preset in ShardConfig.PRESETS) == 14


def test_every_path_it_names_exists() -> None:
    tree = README.split("## Where things are")[1]
    paths = [line.split()[0] for line in tree.splitlines() if re.match(r"\s*[\w./]+\s{2,}\w", line)]
    missing = [p for p in paths if not ((ROOT / p).exists() or (ROOT / "mics_strategy" / p).exists())]
    assert missing == []
    assert len(paths) >= 8
