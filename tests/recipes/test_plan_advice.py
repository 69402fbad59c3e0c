"""Does `--plan` give advice that the recipe can follow?"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import pretrain
from recipes.config import load_recipe
from recipes.files import find_recipe
from recipes.strategy import shard_config

LAB: dict[str, Any] = {
    "ranks_per_node": 2,
    "nodes": 7,  # the recipe's count instead
    "device": {
        "name": "core",
        "memory": "8 GB",
        "memory_bandwidth": "10 GB/s",
        "peak": "50 GFLOP/s",
        "matmul_efficiency": 0.5,
    },
    "intra_node": {"bandwidth": "1 GB/s", "latency": "50 us", "source": "a test"},
    "inter_node": {"bandwidth": "1 GB/s", "latency": "50 us", "source": "a test"},
}


def lab(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "lab.json"
    path.write_text(json.dumps({**LAB, **changes}))
    return str(path)


def test_the_advice_is_a_block_that_the_recipe_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain.main(["llama-debug", "--plan", lab(tmp_path)])
    table, _, text = capsys.readouterr().out.partition("In the recipe, this is\n")
    assert "on 1 nodes of 2 (lab)" in table
    assert "16 samples of 64 tokens" in table
    advice = yaml.safe_load(text)
    recipe = load_recipe([f"--config={find_recipe('llama-debug')}"], has_cuda=False)
    followed = dataclasses.replace(recipe.strategy, name="mics", shard=advice["strategy"]["shard"])
    assert shard_config(followed).world_size == 2
    assert recipe.batch.global_size % (2 * advice["batch"]["micro_size"]) == 0
    assert isinstance(advice["model"]["activation_checkpointing"], bool)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("p4d.24xlarge", "8 ranks on a node, and the recipe llama-debug 2"),
        ("p4d", "Did you mean p4d.24xlarge"),
        ("--trainer.seed=2", "without a cluster"),
    ],
)
def test_what_cannot_be_planned_ends_with_one_sentence(cluster: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        pretrain.main(["llama-debug", "--plan", cluster])
