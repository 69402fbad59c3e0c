"""Does what stands in the launcher's file, or on its command line, arrive as it was meant? No processes are started."""

import argparse
import os
import shlex
from pathlib import Path

import pytest
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.update import update_config
from accelerate.commands.env import env_command
from accelerate.utils import DistributedType
from torch import nn

from mics_strategy import Codec, ConfigError, ShardConfig, Topology
from mics_strategy.accelerate import MiCSPlugin, launch
from mics_strategy.accelerate.accelerator import resolve_plugin
from mics_strategy.cli import main
from mics_strategy.launch_file import LaunchAnswers, default_answers, launch_line, write_launch_file
from tests.accelerate.launchers import sent, written

STRATEGY = "  fsdp_sharding_strategy: "


@pytest.fixture
def arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """`arrives(yaml, *flags)`: the environment that a worker of 4 finds."""

    def into_environment(more: str = "", *flags: object, world_size: int = 4) -> None:
        for name in [n for n in os.environ if n.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        for name, value in sent("--config_file", written(tmp_path, more), *flags).items():
            monkeypatch.setenv(name, value)

    return into_environment


# -- what arrives ----------------------------------------------------------------------------------------------

OPTIONS = {
    "nothing": ("", ShardConfig.preset("mics")),
    "a preset": (f"{STRATEGY}zero3", ShardConfig.preset("zero3")),
    "a preset in upper case": (f"{STRATEGY}MICS", ShardConfig.preset("mics")),
    "options": (f"{STRATEGY}{{partition_size: 2}}", ShardConfig.preset("mics", partition_size=2)),
    "scopes": (
        f"{STRATEGY}{{preset: ddp, optimizer: world, prefetch: 2}}",
        ShardConfig.preset("ddp", optimizer="world", prefetch=2),
    ),
    "plain kinds": (
        f"{STRATEGY}{{hierarchical: false, weight_codec: int8, overlap: [gather, reduce], reduce_dtype: bfloat16}}",
        ShardConfig(hierarchical=False, weight_codec="int8", overlap={"gather", "reduce"}, reduce_dtype="bfloat16"),
    ),
    "nested": (
        f"{STRATEGY}{{topology: {{ranks_per_node: 2}}, grad_codec: {{bits: 4}}}}",
        ShardConfig(topology=Topology(ranks_per_node=2), grad_codec=Codec(bits=4)),
    ),
    "feedback": (
        f"{STRATEGY}{{weight_codec: {{bits: 4, differences: true}}, grad_codec: {{bits: 2, feedback: true}}}}",
        ShardConfig(weight_codec=Codec(bits=4, differences=True), grad_codec=Codec(bits=2, feedback=True)),
    ),
    "switches": (f"{STRATEGY}{{topology: {{nodes_per_switch: 4}}}}", ShardConfig(topology={"nodes_per_switch": 4})),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_file_arrive(arrives: object, name: str) -> None:
    text, expected = OPTIONS[name]
    arrives(text)
    assert launch.is_enabled()
    assert launch.config() == expected
    assert MiCSPlugin().config == expected


def test_flags_outrank_the_file(arrives: object) -> None:
    layers = "  fsdp_transformer_layer_cls_to_wrap: Block\n"
    arrives(layers + f"{STRATEGY}zero3")
    assert launch.layer_classes() == ["Block"]
    flags = ("--fsdp_sharding_strategy", "{'preset': 'zero1'}", "--fsdp_transformer_layer_cls_to_wrap", "Layer,Head")
    arrives(layers + f"{STRATEGY}zero3", *flags, "--fsdp_state_dict_type", "FULL_STATE_DICT")
    assert launch.config() == ShardConfig.preset("zero1")
    assert launch.layer_classes() == ["Layer", "Head"]
    plugin = MiCSPlugin()
    assert plugin.transformer_cls_names_to_wrap == ["Layer", "Head"]
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"


WORDS = {
    "sizes": ("  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 500", 500),
    "layers": (
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: Block, Head",
        ("Block", "Head"),
    ),
    "layers by the model": ("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "auto"),
    "layers by name alone": ("  fsdp_transformer_layer_cls_to_wrap: Block", ("Block",)),
    "none": ("  fsdp_auto_wrap_policy: NO_WRAP", "auto"),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_for_units_arrive(arrives: object, name: str) -> None:
    text, expected = WORDS[name]
    arrives(text)
    assert MiCSPlugin().units_for(nn.Linear(2, 2)) == expected


def test_words_shared_with_fsdp_arrive(arrives: object) -> None:
    arrives("  fsdp_activation_checkpointing: true\n  fsdp_cpu_ram_efficient_loading: false")
    plugin = MiCSPlugin()
    assert (plugin.activation_checkpointing, plugin.cpu_ram_efficient_loading) == (True, False)
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    arrives("  fsdp_state_dict_type: FULL_STATE_DICT")
    plugin = MiCSPlugin()
    assert (plugin.activation_checkpointing, plugin.cpu_ram_efficient_loading) == (False, True)
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"


def test_what_the_script_says_outranks_the_file(arrives: object) -> None:
    arrives(f"  fsdp_transformer_layer_cls_to_wrap: Block\n{STRATEGY}zero3")
    plugin = MiCSPlugin("zero1", prefetch=2, transformer_cls_names_to_wrap=["Layer"])
    assert plugin.config == ShardConfig.preset("zero1", prefetch=2)
    assert plugin.transformer_cls_names_to_wrap == ["Layer"]
    assert MiCSPlugin(prefetch=2).config == ShardConfig.preset("zero3", prefetch=2)


def test_a_file_of_fsdp_asks_for_nothing(arrives: object) -> None:
    arrives("", "--fsdp_version", "2")
    assert not launch.is_enabled()
    assert MiCSPlugin().config == ShardConfig.preset("mics")


# -- what is refused -------------------------------------------------------------------------------------------

REFUSED = {
    "unknown option": (f"{STRATEGY}{{partition_sizes: 2}}", "Unknown option 'partition_sizes'.*mean partition_size"),
    "unknown preset": (f"{STRATEGY}zero4", "'zero4'` is not known.*zero3"),
    "a number": (f"{STRATEGY}8", "fsdp_sharding_strategy: 8.*partition_size: 8"),
    "a list": (f"{STRATEGY}[mics, 2]", "fsdp_sharding_strategy.*mapping"),
    "a preset of another kind": (f"{STRATEGY}{{preset: [mics]}}", "preset"),
    "unknown codec option": (f"{STRATEGY}{{grad_codec: {{bit: 4}}}}", "grad_codec.*Codec.*bit"),
    "hybrid": (f"{STRATEGY}HYBRID_SHARD", "option of FSDP.*fsdp_sharding_strategy: mics"),
    "hybrid zero2": (f"{STRATEGY}HYBRID_SHARD_ZERO2", "option of FSDP.*paro-nii"),
    "zero2": (f"{STRATEGY}SHARD_GRAD_OP", "option of FSDP.*zero2"),
    "none": (f"{STRATEGY}NO_SHARD", "option of FSDP.*ddp"),
    "the same as a preset": (f"{STRATEGY}{{preset: HYBRID_SHARD}}", "HYBRID_SHARD"),
    "offload": ("  fsdp_offload_params: true", "fsdp_offload_params: true.*Shard over more ranks"),
    "ignored modules": ("  fsdp_ignored_modules: head.*", "fsdp_ignored_modules.*Freeze"),
    "kept parameters": ("  fsdp_reshard_after_forward: false", "fsdp_reshard_after_forward.*params: replicate"),
    "another rule": ("  fsdp_reshard_after_forward: SHARD_GRAD_OP", "fsdp_reshard_after_forward"),
    "activations on the CPU": (
        "  fsdp_activation_checkpointing: true\n  fsdp_activation_checkpointing_offload: true",
        "fsdp_activation_checkpointing_offload",
    ),
}


if not hasattr(FullyShardedDataParallelPlugin, "activation_checkpointing_offload"):
    del REFUSED["activations on the CPU"]  # Accelerate 1.14 has no such option


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused(arrives: object, name: str) -> None:
    text, match = REFUSED[name]
    arrives(text)
    with pytest.raises(ConfigError, match=match):
        MiCSPlugin()


def test_a_slip_in_the_version_is_named(arrives: object) -> None:
    arrives("", "--fsdp_version", "2")
    os.environ["FSDP_VERSION"] = "mcis"
    with pytest.raises(ConfigError, match=r"`fsdp_version: mcis` .* Write `fsdp_version: mics`"):
        FullyShardedDataParallelPlugin()


@pytest.mark.parametrize("script", [{"config": "mics"}, {"prefetch": 2}], ids=["a preset", "an option"])
def test_words_of_fsdp_are_refused_whatever_the_script_says(arrives: object, script: dict[str, object]) -> None:
    arrives("  fsdp_offload_params: true")
    with pytest.raises(ConfigError, match="fsdp_offload_params"):
        MiCSPlugin(**script)


# -- parallelism_config ----------------------------------------------------------------------------------------


def parallel(**sizes: int) -> str:
    lines = "".join(f"  parallelism_config_{name}: {size}\n" for name, size in sizes.items())
    return f"\nparallelism_config:\n{lines}"


def test_sizes_of_parallelism_give_the_partition(arrives: object) -> None:
    arrives(parallel(dp_shard_size=2, dp_replicate_size=2))
    assert launch.partition_size() == 2
    arrives(parallel(dp_shard_size=1, dp_replicate_size=4))
    assert launch.partition_size() == 1
    arrives("")
    assert launch.partition_size() is None


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"dp_shard_size": 2, "dp_replicate_size": 1, "tp_size": 2}, "tp_size=2.*Only data parallelism"),
        ({"dp_shard_size": 2, "cp_size": 2}, "cp_size=2.*Only data parallelism"),
        ({"dp_shard_size": 2, "dp_replicate_size": 4}, "dp_shard_size=2 times dp_replicate_size=4.*4 processes"),
        ({"dp_shard_size": 2}, "dp_shard_size=2 times dp_replicate_size=1.*4 processes"),
    ],
    ids=str,
)
def test_other_parallelism_is_refused(arrives: object, sizes: dict[str, int], match: str) -> None:
    arrives(parallel(**sizes))
    with pytest.raises(ConfigError, match=match):
        launch.partition_size()


@pytest.mark.parametrize("preset", ["auto", "ddp"])
def test_a_partition_of_a_preset_that_has_none_is_refused(arrives: object, preset: str) -> None:
    arrives(f"{STRATEGY}{preset}" + parallel(dp_shard_size=2, dp_replicate_size=2))
    with pytest.raises(ConfigError, match=r"dp_shard_size=2 sets the size of a partition, but no scope.*Remove `para"):
        resolve_plugin(None, None)


# -- mics config -----------------------------------------------------------------------------------------------

ANSWERS = {
    "one machine": LaunchAnswers(device="gpu", processes_per_machine=8, precision="bf16"),
    "several": LaunchAnswers(
        device="gpu",
        num_machines=4,
        processes_per_machine=8,
        address="10.0.0.1",
        port=29500,
        precision="fp16",
        preset="paro-iig",
        partition_size=16,
        layer_class="LlamaDecoderLayer",
    ),
    "cpu": LaunchAnswers(device="cpu", processes_per_machine=2, precision="no", partition_size="world"),
    "auto": LaunchAnswers(device="cpu", processes_per_machine=2, precision="no", preset="auto"),
}


def read_by_us(file: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    with monkeypatch.context() as patch:
        for name, value in sent("--config_file", file, "--main_process_port", "0").items():
            patch.setenv(name, value)
        assert launch.is_enabled()
        precision = os.environ["ACCELERATE_MIXED_PRECISION"]
        return launch.config(), launch.layer_classes(), precision, MiCSPlugin().activation_checkpointing


@pytest.mark.parametrize("name", ANSWERS)
def test_the_written_file_is_read_by_accelerate_and_by_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    answers, file = ANSWERS[name], tmp_path / "mics.yaml"
    write_launch_file(file, answers)
    read = load_config_from_file(str(file))
    assert read.distributed_type == DistributedType.FSDP
    assert read.num_processes == answers.num_machines * answers.processes_per_machine
    assert (read.num_machines, read.mixed_precision) == (answers.num_machines, answers.precision)
    assert read.use_cpu is (answers.device == "cpu")
    assert (read.main_process_ip or "") == answers.address
    expected = ShardConfig.preset(answers.preset, partition_size=answers.partition_size)
    layers = [answers.layer_class] if answers.layer_class else None
    assert read_by_us(file, monkeypatch) == (expected, layers, answers.precision, False)
    env_command(argparse.Namespace(config_file=str(file)))
    assert str({"preset": answers.preset, "partition_size": answers.partition_size}) in capsys.readouterr().out
    update_config(argparse.Namespace(config_file=str(file)))
    assert read_by_us(file, monkeypatch) == (expected, layers, answers.precision, False)
    assert ("ACCELERATE_USE_CPU=true" in launch_line(file, answers)) == (answers.device == "cpu")


def test_defaults_are_written_without_a_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mics.yaml"
    assert main(["config", "--defaults", "--output", str(file)]) == 0
    assert launch_line(file, default_answers()) in capsys.readouterr().out
    before = file.read_text()
    file.write_text(before + "# mine\n")
    assert main(["config", "--defaults", "--output", str(file)]) == 1
    assert "--force" in capsys.readouterr().err
    assert file.read_text().endswith("# mine\n")
    assert main(["config", "--defaults", "--force", "--output", str(file)]) == 0
    assert file.read_text() == before
    assert main(["config", "--defaults", "--output", str(tmp_path / "absent" / "mics.yaml")]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mics.yaml"]


def test_questions_are_asked_until_the_answer_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = {
        "tpu": "`device=tpu` is not available. Use gpu or cpu.",
        "GPU": "",
        "0": "`num_machines=0` is not a number of machines",
        "two": "'two' is not a number",
        "2": "",
        "8": "",
        "": "`address=''` is not an address",
        "10.0.0.1": "",
        "70000": "`port=70000` is not a port",
        "29600": "",
        "fp8": "`precision=fp8` is not available. Use bf16 or fp16 or no.",
        "bf16": "",
        "mcis": "`preset='mcis'` is not known",
        "zero3": "",
        "12": "`partition_size=12` does not divide the 16 ranks of this job",
        "node": "",
        "Llama Layer": "`layer_class='Llama Layer'` is not the name of a class",
        "LlamaDecoderLayer": "",
    }
    answers = iter(typed)
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    file = tmp_path / "mics.yaml"
    assert main(["config", "--output", str(file)]) == 0
    printed = capsys.readouterr().out
    for message in typed.values():
        assert message in printed
    assert load_config_from_file(str(file)).main_process_port == 29600
    assert "partition_size: node" in file.read_text()


def test_an_end_of_answers_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", no_more)
    assert main(["config", "--output", str(tmp_path / "mics.yaml")]) == 1
    assert "--defaults" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"device": "cpu", "precision": "fp16"}, "`precision=fp16` is not available. Use no or bf16"),
        ({"num_machines": 2, "port": 29500}, "`address=''` is not an address at which 2 machines"),
        ({"num_machines": 2, "address": "a", "port": 0}, "`port=0`"),
        ({"partition_size": 16}, "`partition_size=16` does not divide the 8 ranks"),
        ({"partition_size": 6}, "`partition_size=6`"),
        ({"preset": "fsdp"}, "'fsdp'` is not known"),
        ({"layer_class": "A;B"}, "not the name of a class"),
    ],
    ids=str,
)
def test_impossible_answers_are_refused(given: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LaunchAnswers(**{"device": "gpu", "processes_per_machine": 8, "precision": "no", **given})


def test_the_shown_command_quotes_the_path_of_the_file() -> None:
    file = Path("my configs/$(a); b.yaml")
    assert str(file) in shlex.split(launch_line(file, default_answers()))
