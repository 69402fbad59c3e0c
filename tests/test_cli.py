"""Does the command say and do what it is asked, and end with words where it cannot?"""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from mics_strategy.cli import main, parser
from tests.checkpoint.test_export import saved
from tests.engine.training import assert_identical
from tests.ranks import RankPool

OPTIONS = {
    "inspect": ["path", "--tensors"],
    "export": ["path", "folder", "--prefix", "--dtype", "--config", "--file-gb"],
    "config": ["--output", "--defaults", "--force"],
    "estimate": [
        *("model", "--nodes", "--ranks-per-node", "--preset", "--partition-size", "--param-dtype", "--units"),
        "--state-bytes",
    ],
    "pretrain": [],  # the recipes' program parses its own
    "fidelity": [],  # the recipes' program parses its own
    "launch": [],  # the recipes' program parses its own
    "report": [],  # the recipes' program parses its own
    "export-hf": [],  # the recipes' program parses its own
    "plan": [],  # the planner's program parses its own
    "simulate": [],  # the planner's program parses its own
    "data": [],  # the recipes' program parses its own
}


def test_commands_and_options_are_those_agreed() -> None:
    (commands,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    found = {
        name: [(action.option_strings or [action.dest])[0] for action in command._actions if action.dest != "help"]
        for name, command in commands.choices.items()
    }
    assert found == OPTIONS


def test_inspect_says_what_is_there(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = saved(ranks, tmp_path / "step-2")
    assert main(["inspect", str(tmp_path / "step-2"), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "step 2, written by 4 ranks (params over 2, grads over 2, optimizer over 2)" in text
    numel = sum(value.numel() for value in expected.values())
    assert f"model: {len(expected)} tensors, {numel:,} elements" in text
    assert "files are intact" in text
    for name, value in expected.items():
        assert f"  model.{name} {list(value.shape)} " in text
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("step-2: step 2, written by 4 ranks")


def test_damage_ends_the_command(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(ranks, tmp_path / "step-2")
    file = tmp_path / "step-2" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert main(["inspect", str(tmp_path / "step-2")]) == 1
    assert "right size, but other bytes" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert "is not a finished checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_export_from_a_shell(ranks: RankPool, tmp_path: Path) -> None:
    expected = saved(ranks, tmp_path / "step-2")
    command = [str(Path(sys.executable).parent / "mics"), "export", str(tmp_path / "step-2"), str(tmp_path / "hf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == str(tmp_path / "hf" / "model.safetensors")
    assert_identical(dict(sorted(load_file(tmp_path / "hf" / "model.safetensors").items())), expected)


def test_estimate_says_what_each_rank_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaConfig(vocab_size=32000, **sizes).save_pretrained(tmp_path)
    command = ["estimate", str(tmp_path), "--nodes", "4", "--ranks-per-node", "8", "--param-dtype", "bfloat16"]
    assert main(command) == 0
    first, scopes, *rows = capsys.readouterr().out.splitlines()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes))
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert first == f"LlamaForCausalLM, {numel / 1e9:.3f} B parameters in 7 units, on 32 ranks"
    assert scopes == "parameters over 8, gradients over 8, optimizer states over 8 ranks"
    gigabytes = {row[:30].strip(): float(row[30:].split()[0]) for row in rows}
    assert gigabytes["master shards"] == pytest.approx(4 * numel / 8 / 1e9, rel=0.01)
    assert gigabytes["optimizer states"] == pytest.approx(8 * numel / 8 / 1e9, rel=0.01)
    assert gigabytes.pop("total per rank") == pytest.approx(sum(gigabytes.values()), abs=0.005)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere", "--ranks-per-node", "8"], "is not a model of transformers"),
        ([".", "--ranks-per-node", "8", "--preset", "zero4"], "zero4"),
        ([".", "--ranks-per-node", "8", "--partition-size", "3"], "does not divide"),
        ([".", "--ranks-per-node", "8", "--units", "Layer"], "no module of class Layer"),
    ],
)
def test_estimate_refuses_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(".")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["estimate", *options]) == 1
    assert words in capsys.readouterr().err
