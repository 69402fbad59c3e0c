"""Does the command say and do what it is asked, and end with words where it cannot?"""

import argparse
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from mics_strategy import __version__, cli
from mics_strategy.cli import main, parser
from mics_strategy.version import install_advice
from tests.checkpoint.test_export import saved
from tests.engine.training import assert_identical
from tests.ranks import RankPool

OPTIONS = {
    "inspect": ["path", "--tensors"],
    "export": ["path", "folder", "--prefix", "--dtype", "--config", "--file-gb"],
    "config": ["--output", "--defaults", "--force"],
    "estimate": [
        *("model", "--nodes", "--ranks-per-node", "--nodes-per-switch", "--preset", "--partition-size", "--params"),
        *("--grads", "--optimizer", "--secondary", "--weight-codec", "--grad-codec", "--codec-links", "--prefetch"),
        *("--outer-every", "--outer-delay"),
        "--second-hop",
        *(
            "--param-dtype",
            "--reduce-dtype",
            "--grad-accum-dtype",
            "--units",
            "--state-bytes",
            "--micro-batch",
            "--seq-len",
        ),
        *("--recompute", "--communicator-memory", "--memory", "--cluster"),
    ],
    "calibrate": ["--output", "--name", "--device", "--max-mib", "--stage-s", "--dtype", "--peak-tflops"],
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


@pytest.mark.interpreter
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_what_there_is_and_in_which_version_is_said_without_torch(option: str) -> None:
    code = (
        "import sys, mics_strategy.cli\n"
        f"try: mics_strategy.cli.main([{option!r}])\n"
        "except SystemExit as end: print('torch' in sys.modules, end.code)"
    )
    env = {**os.environ, "COLUMNS": "60"}  # fewer than the version has
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    *said, last = child.stdout.splitlines()
    assert last == "False 0"
    if option == "--version":
        assert said == [f"mics_strategy {__version__}, torch {version('torch')}, Python {platform.python_version()}"]
    else:
        assert {line.split()[0] for line in said if line.startswith("    ") and line[4] != " "} == {*OPTIONS}


@pytest.mark.interpreter
@pytest.mark.parametrize("num_characters", [1, 100_000], ids=["when-flushed", "when-printed"])
def test_a_reader_that_has_gone_ends_the_command_without_words(num_characters: int) -> None:
    code = (
        "import sys\n"
        "from mics_strategy import cli\n"
        f"cli._configure = lambda options: print('x' * {num_characters})\n"
        "sys.exit(cli.main(['config']))"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        child = subprocess.run([sys.executable, "-c", code], env=buffered, stdout=output, stderr=subprocess.PIPE)
    assert (child.returncode, child.stderr) == (128 + signal.SIGPIPE, b"")


def test_the_broken_pipe_of_a_process_is_an_error(capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def write(options: object) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        os.write(writer, b"task")

    monkeypatch.setattr(cli, "_inspect", write)
    with capfd.disabled(), pytest.raises(BrokenPipeError):
        main(["inspect", "folder"])


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


def test_a_wrong_path_is_not_taken_for_a_changed_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "hf")]) == 1
    assert capsys.readouterr().err.startswith(f"mics export: `{tmp_path / 'nowhere'}` does not exist. Pass the folder")
    (tmp_path / "step=2.ckpt").touch()
    assert main(["export", str(tmp_path / "step=2.ckpt"), str(tmp_path / "hf")]) == 1
    assert "step=2.ckpt` is a file, and this reads folders of sharded checkpoints. `torch" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "step=2.ckpt")]) == 1
    assert "step=2.ckpt` is a file, and this reads folders" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "hf")]) == 1
    message = f"mics export: `{tmp_path}` is not a checkpoint: it has no `.metadata`. Pass the folder of a checkpoint"
    assert capsys.readouterr().err.startswith(message)
    for name in ("optimizer_0", "pytorch_model_fsdp_0"):  # as `Accelerator.save_state` names them
        inner = tmp_path / name
        inner.mkdir()
        (inner / ".metadata").touch()
    assert main(["export", str(tmp_path), str(tmp_path / "hf")]) == 1
    assert f"it has no `.metadata`. Pass `{inner}`." in capsys.readouterr().err


def test_a_path_that_cannot_be_written_ends_the_command(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(ranks, tmp_path / "step-2")
    (tmp_path / "file").touch()
    assert main(["export", str(tmp_path / "step-2"), str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == (
        f"mics export: `{tmp_path / 'file'}` cannot be used: a folder is needed there, and a file is in its place. "
        "Name another path, or correct this one.\n"
    )
    assert main(["config", "--defaults", "--output", "/proc/x.yaml"]) == 1
    assert capsys.readouterr().err.startswith("mics config: `/proc/x.yaml` cannot be used: No such file or directory.")


def test_estimate_says_which_transformers_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["estimate", str(tmp_path), "--ranks-per-node", "2"]) == 1
    assert install_advice("recipes") in capsys.readouterr().err


def test_pretrain_without_a_recipe_says_how_to_name_one() -> None:
    with pytest.raises(SystemExit, match=r"No recipe was given\. Name one, as in `mics pretrain llama-debug`"):
        main(["pretrain"])


def test_damage_ends_the_command(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(ranks, tmp_path / "step-2")
    file = tmp_path / "step-2" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert main(["inspect", str(tmp_path / "step-2")]) == 1
    assert "right size, but other bytes" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert "nowhere` does not exist. Pass the folder of a checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_export_from_a_shell(ranks: RankPool, tmp_path: Path) -> None:
    expected = saved(ranks, tmp_path / "step-2")
    command = [str(Path(sys.executable).parent / "mics"), "export", str(tmp_path / "step-2"), str(tmp_path / "hf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "hf" / "model.safetensors")
    assert_identical(dict(sorted(load_file(tmp_path / "hf" / "model.safetensors").items())), expected)


def test_the_example_in_the_help_of_estimate_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["estimate", "--help"])
    example = capsys.readouterr().out.partition("example: mics ")[2]
    assert main(shlex.split(example)) == 0
    assert re.search(r"of a GPU +80\.000 GB", capsys.readouterr().out)


def test_estimate_says_what_each_rank_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaConfig(vocab_size=32000, **sizes).save_pretrained(tmp_path)
    command = ["estimate", str(tmp_path), "--nodes", "4", "--ranks-per-node", "8", "--param-dtype", "bfloat16"]
    assert main(command) == 0
    first, scopes, assumed, *rows = capsys.readouterr().out.splitlines()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes))
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert first == f"LlamaForCausalLM, {numel / 1e9:.3f} B parameters in 7 units, on 32 ranks"
    assert scopes == "parameters over 8, gradients over 8, optimizer states over 8 ranks"
    assert assumed.startswith(
        "computed in bfloat16 (--param-dtype), 8 bytes of optimizer states an element, activations"
    )
    gigabytes = {row[:30].strip(): float(row[30:].split()[0]) for row in rows}
    assert gigabytes["master shards"] == pytest.approx(4 * numel / 8 / 1e9, rel=0.01)
    assert gigabytes["optimizer states"] == pytest.approx(8 * numel / 8 / 1e9, rel=0.01)
    assert gigabytes.pop("total per rank") == pytest.approx(sum(gigabytes.values()), abs=0.005)


def rows_of(text: str) -> dict[str, float]:
    return {row[:30].strip(): float(row[30:].split()[0]) for row in text.splitlines()[3:]}


def test_estimate_counts_activations_and_takes_any_scopes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaConfig(vocab_size=4096, tie_word_embeddings=False, **sizes).save_pretrained(tmp_path)
    options = [*("--nodes", "4", "--ranks-per-node", "8", "--params", "4", "--grads", "4", "--optimizer", "8")]
    options += ["--param-dtype", "bfloat16", "--weight-codec", "int8", "--codec-links", "all", "--prefetch", "2"]
    batch = ["--micro-batch", "2", "--seq-len", "2048"]
    assert main(["estimate", str(tmp_path), *options, *batch]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[1] == "parameters over 4, gradients over 4, optimizer states over 8 ranks"
    kept = rows_of(text)
    assert kept["total per rank"] == pytest.approx(sum(kept.values()) - kept["total per rank"], abs=0.005)
    assert main(["estimate", str(tmp_path), *options, *batch, "--recompute"]) == 0
    recomputed = rows_of(capsys.readouterr().out)
    assert recomputed["activations of layers"] == pytest.approx(4 * 2 * 2048 * 512 * 2 / 1e9, abs=0.001)
    assert kept["activations of layers"] > 15 * recomputed["activations of layers"]
    assert main(["estimate", str(tmp_path), *options, *batch, "--recompute", "1/2"]) == 0
    text = capsys.readouterr().out
    assert ", 0.5 of the layers recomputed" in text
    mean = (kept["activations of layers"] + recomputed["activations of layers"]) / 2
    assert rows_of(text)["activations of layers"] == pytest.approx(mean, abs=0.002)
    assert main(["estimate", str(tmp_path), *options, *batch, "--recompute", "attention"]) == 0
    text = capsys.readouterr().out
    assert ", attention recomputed" in text
    assert mean < rows_of(text)["activations of layers"] < kept["activations of layers"]


def test_estimate_of_a_catalog_name_chooses_scopes_for_a_memory(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "LLaMA-13B", "--nodes", "2", "--ranks-per-node", "8", "--preset", "auto"]
    command += ["--param-dtype", "bfloat16"]
    assert main([*command, "--memory", "80 GB"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama-13b, 13.016 B parameters in 43 units, on 16 ranks\nparameters over 1,")
    assert "80.000 GB" in text.splitlines()[-1]
    assert main([*command, "--cluster", "p3dn.24xlarge"]) == 0
    assert not capsys.readouterr().out.splitlines()[1].startswith("parameters over 1,")


@pytest.mark.parametrize(("memory", "ranks"), [("80 GB", 4), ("40 GB", 8), ("20 GB", 16)])
def test_estimate_of_an_auto_partition_fits_the_memory(
    capsys: pytest.CaptureFixture[str], memory: str, ranks: int
) -> None:
    command = ["estimate", "llama-7b", "--nodes", "4", "--ranks-per-node", "8", "--param-dtype", "bfloat16"]
    assert main([*command, "--memory", memory]) == 0
    scopes = f"parameters over {ranks}, gradients over {ranks}, optimizer states over {ranks} ranks"
    text = capsys.readouterr().out
    assert scopes == text.splitlines()[1]
    assert text.splitlines()[-1].endswith("GB left for these")
    sizes = {"--partition-size": "auto", "--nodes-per-switch": "2"}
    assert main([*command, "--memory", memory, *(word for option in sizes.items() for word in option)]) == 0
    assert scopes in capsys.readouterr().out


def test_estimate_chooses_what_shard_would_for_a_module_and_its_description(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With activations of a stated micro-batch in place of the assumed ones, and links of a file or a product."""
    command = ["estimate", "tests.test_cli:make_tiny", "--nodes", "2", "--ranks-per-node", "2", "--preset", "auto"]
    assert main([*command, "--cluster", "p4d.24xlarge", "--nodes-per-switch", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("parameters over 1,")
    catalog = ["estimate", "llama-7b", "--ranks-per-node", "8", "--memory", "24 GB", "--param-dtype", "bfloat16"]
    assert main(catalog) == 0
    assert "parameters over 8," in capsys.readouterr().out
    assert main([*catalog, "--nodes", "2", "--micro-batch", "2", "--seq-len", "1024"]) == 0
    assert "parameters over 16," in capsys.readouterr().out


def make_tiny() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def test_estimate_of_a_function_of_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "tests.test_cli:make_tiny", "--ranks-per-node", "2"]) == 0
    assert capsys.readouterr().out.startswith("Sequential, 0.000 B parameters")
    assert main(["estimate", "tests.test_cli:nothing", "--ranks-per-node", "2"]) == 1
    assert "names no function" in capsys.readouterr().err


def test_estimate_takes_nodes_and_ranks_from_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("{like: dgx-a100, nodes: 3}")
    options = ["--micro-batch", "2", "--seq-len", "128", "--param-dtype", "bfloat16"]
    for cluster, stated, ranks in (
        (str(file), [], 24),
        (str(file), ["--nodes", "2"], 16),
        (str(file), ["--ranks-per-node", "4"], 12),
        ("dgx-a100", [], 8),
    ):
        assert main(["estimate", "llama-7b", "--cluster", cluster, *stated, *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith(f"on {ranks} ranks")
        assert lines[2].startswith("computed in bfloat16 (--param-dtype), 8 bytes of optimizer states an element, 2 x")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["llama-7b", "--nodes", "2"], "the number of GPUs of a node is unknown. Add for example `--ranks-per-node 8`"),
        (["llama-7b", "--ranks-per-node", "8", "--preset", "auto"], "Give `--memory"),
        (["llama-7b", "--ranks-per-node", "8", "--memory", "10 GB"], "does not fit into the 10 GB of a rank"),
        (
            ["llama-7b", "--ranks-per-node", "2", "--nodes", "4", "--nodes-per-switch", "3"],
            "does not divide the 4 nodes",
        ),
        (["llama-7b", "--ranks-per-node", "8", "--params", "16"], "does not divide the 8 ranks"),
        (["llama-7b", "--ranks-per-node", "8", "--optimizer", "4"], "coarser than `params`"),
        (["llama-7b", "--ranks-per-node", "8", "--recompute"], "Add `--micro-batch 1`"),
        (
            ["llama-7b", "--ranks-per-node", "8", "--micro-batch", "1", "--recompute", "1/40"],
            "less than one of the 32 layers. Use 1/32 or more",
        ),
        (["llama-7b", "--ranks-per-node", "8", "--micro-batch", "1", "--recompute", "auto"], "is for `mics plan`"),
        (["llama-7b", "--ranks-per-node", "8", "--micro-batch", "0"], "`--micro-batch 0` is too small. Use 1 or more."),
        (["llama-7b", "--ranks-per-node", "8", "--nodes", "0"], "`--nodes 0` is too small. Use 1 or more."),
        (["llama-7b", "--ranks-per-node", "8", "--memory", "80 monkeys"], "`--memory`"),
        (["llama-7b", "--ranks-per-node", "8", "--cluster", "p9"], "no cluster"),
        (["llama-7b", "--ranks-per-node", "8", "--units", "Layer"], "Remove it"),
        (["bert-10b", "--ranks-per-node", "8", "--micro-batch", "1", "--seq-len", "1024"], "512 positions"),
        (["nowhere", "--ranks-per-node", "8"], "is not a model of the catalog, nor a recipe, nor in transformers'"),
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
