"""What stands in the file that `accelerate launch --config_file` reads?

A few questions, asked one by one and checked as they are answered, or their defaults; then a commented file. The
unmodified launcher reads it, and `mics_strategy.accelerate` what the launcher hands on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.scopes import resolve_scopes
from mics_strategy.topology import Topology

_DEVICES = ("gpu", "cpu")
_PRECISIONS = {"gpu": ("bf16", "fp16", "no"), "cpu": ("no", "bf16")}
_WORDS = ("auto", "node", "world")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?")
_CLASSES = re.compile(r"[A-Za-z_]\w*(, ?[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAnswers:
    """What a job is to be.

    Attributes:
        device: "gpu" or "cpu".
        num_machines: One or more.
        processes_per_machine: One for each GPU.
        address: Of the first machine; empty where there is one.
        port: On which the first machine listens; 0 for a free one, where there is one machine.
        precision: "bf16", "fp16" or "no".
        preset: Of `ShardConfig`, or "auto".
        partition_size: Of `ShardConfig`.
        layer_class: Classes of the model's layers, with commas; empty to have them found.

    Raises:
        ConfigError: An impossible value, or values that do not fit one another.
    """

    device: str
    num_machines: int = 1
    processes_per_machine: int
    address: str = ""
    port: int = 0
    precision: str
    preset: str = "mics"
    partition_size: str | int = "auto"
    layer_class: str = ""

    def __post_init__(self) -> None:
        _check_choice("device", self.device, _DEVICES)
        for name, what in (("num_machines", "machines"), ("processes_per_machine", "processes")):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}={getattr(self, name)}` is no number of {what}. Use 1 or more.")
        if self.num_machines > 1 and not _HOST.fullmatch(self.address):
            raise ConfigError(
                f"`address={self.address!r}` is no address by which {self.num_machines} machines find the first one. "
                "Use its IP address or its name, such as 10.0.0.1."
            )
        if not (self.num_machines == 1 and self.port == 0) and not 1 <= self.port <= 65535:
            raise ConfigError(f"`port={self.port}` is no port that all machines can know. Use 1024 to 65535.")
        _check_choice("precision", self.precision, _PRECISIONS[self.device])
        config = ShardConfig.preset(self.preset, partition_size=self.partition_size)
        if not config.is_auto:
            world_size = self.num_machines * self.processes_per_machine
            resolve_scopes(config, Topology(ranks_per_node=self.processes_per_machine), world_size)
        if self.layer_class and not _CLASSES.fullmatch(self.layer_class):
            raise ConfigError(
                f"`layer_class={self.layer_class!r}` is no class's name. Use LlamaDecoderLayer, say, or nothing."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What to ask for a field of `LaunchAnswers`, and how an answer is read."""

    field: str
    text: str
    read: Callable[[str], str | int]
    only_with_several_machines: bool = False


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number. Use digits alone.") from None


def _size(text: str) -> str | int:
    return text if text in _WORDS else _number(text)


_QUESTIONS = (
    _Question(field="device", text="Train on gpu or cpu?", read=str.lower),
    _Question(field="num_machines", text="How many machines?", read=_number),
    _Question(field="processes_per_machine", text="How many processes on each, one for each GPU?", read=_number),
    _Question(
        field="address",
        text="The address of the first machine, as the others see it?",
        read=str,
        only_with_several_machines=True,
    ),
    _Question(field="port", text="A free port of it?", read=_number, only_with_several_machines=True),
    _Question(field="precision", text="Compute in bf16, fp16 or no lower precision?", read=str.lower),
    _Question(field="preset", text="Which preset (mics, zero1, zero2, zero3, zeropp, paro-iig, auto, ...)?", read=str),
    _Question(field="partition_size", text="Shard over how many ranks (auto, node, world or a number)?", read=_size),
    _Question(field="layer_class", text="The class of the model's layers (nothing: they are found)?", read=str),
)


def default_answers() -> LaunchAnswers:
    """One machine, all its GPUs in bf16, or two processes where it has none."""
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        return LaunchAnswers(device="gpu", processes_per_machine=num_gpus, precision="bf16")
    return LaunchAnswers(device="cpu", processes_per_machine=2, precision="no")


def prompt(read_line: Callable[[str], str], tell: Callable[[str], None]) -> LaunchAnswers:
    """Ask every question until its answer fits the ones before.

    Args:
        read_line: Shows a question and returns what was typed; empty for the default.
        tell: Shows why an answer does not fit.

    Raises:
        ConfigError: `read_line` has nothing more to read.
    """
    given: dict[str, str | int] = {}
    defaults = {field.name: getattr(default_answers(), field.name) for field in fields(LaunchAnswers)}
    for question in _QUESTIONS:
        if question.only_with_several_machines and given["num_machines"] == 1:
            continue
        default = _default_of(question.field, given, defaults)
        while True:
            try:
                typed = read_line(f"{question.text} [{default}] ").strip()
            except EOFError:
                raise ConfigError(
                    f"The answers end before `{question.field}`. Answer all questions, or use `--defaults`."
                ) from None
            try:
                given[question.field] = question.read(typed) if typed else default
                _check_partial(given, defaults)
                break
            except ConfigError as error:
                tell(str(error))
    return LaunchAnswers(**given)  # type: ignore[arg-type]


def _default_of(field: str, given: dict[str, str | int], defaults: dict[str, str | int]) -> str | int:
    """What an empty answer means, after those before."""
    if field == "processes_per_machine" and given["device"] == "gpu":
        return torch.cuda.device_count() or 8
    if field == "port":
        return 29500
    if field == "precision":
        return _PRECISIONS[str(given["device"])][0]
    return defaults[field]


def _check_partial(given: dict[str, str | int], defaults: dict[str, str | int]) -> None:
    """Refuse answers that do not fit, whatever the ones to come may be."""
    later = {
        **defaults,
        "address": "later",
        "port": 29500,
        "precision": "no",
        "processes_per_machine": 1,
    }
    LaunchAnswers(**{**later, **given})  # type: ignore[arg-type]


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"`{name}={value}` is not available. Use {' or '.join(choices)}.")


def write_launch_file(path: Path, answers: LaunchAnswers, *, overwrites: bool = False) -> None:
    """Write the file, whole or not at all.

    Raises:
        ConfigError: It is there already, or its folder is not.
    """
    if path.exists() and not overwrites:
        raise ConfigError(f"`{path}` exists. Use `--force` to write over it, or `--output` for another name.")
    if not path.parent.is_dir():
        raise ConfigError(f"`{path.parent}` is no folder. Make it, or use `--output` for another place.")
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(launch_text(answers))
    os.replace(draft, path)


def launch_text(answers: LaunchAnswers) -> str:
    """The file."""
    several = answers.num_machines > 1
    lines = [
        "# Read by `accelerate launch --config_file`, as it is; written by `mics config`.",
        *("compute_environment: LOCAL_MACHINE", "distributed_type: FSDP"),
        f"mixed_precision: '{answers.precision}'  # bf16, fp16 or 'no'; transformers.Trainer reads its own `bf16=True`",
        f"use_cpu: {str(answers.device == 'cpu').lower()}",
        f"num_machines: {answers.num_machines}",
        f"num_processes: {answers.num_machines * answers.processes_per_machine}  # on all machines together",
        f"machine_rank: 0{'  # another on each machine: --machine_rank 1' if several else ''}",
        *([f"main_process_ip: '{answers.address}'"] if several else []),
        f"main_process_port: {answers.port}{'' if several else '  # 0: a free one'}",
        *(["same_network: true  # main_process_ip is reached from every machine"] if several else []),
        "fsdp_config:",
        "  fsdp_version: mics  # without mics_strategy the script stops, and does not train by FSDP instead",
        *_layer_lines(answers.layer_class),
        "  # true: from_pretrained reads weights on one rank of a node only; a script must not move its model then",
        "  fsdp_cpu_ram_efficient_loading: false",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT  # what save_state writes; FULL_STATE_DICT: one file",
        "  fsdp_activation_checkpointing: false  # true: recompute the layers' activations in the backward",
        "  fsdp_sharding_strategy:  # any option of mics_strategy.ShardConfig",
        f"    preset: {answers.preset}",
        f"    partition_size: {answers.partition_size}  # ranks that share one copy; auto: those of a node",
    ]
    return "\n".join(lines) + "\n"


def _layer_lines(layer_class: str) -> list[str]:
    if layer_class:
        return [f"  fsdp_transformer_layer_cls_to_wrap: {layer_class}  # each layer is gathered by itself"]
    return ["  # fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer  # left out: the repeated layers are found"]


def launch_line(path: Path, answers: LaunchAnswers) -> str:
    """What is typed to start the job."""
    on_cpu = "ACCELERATE_USE_CPU=true " if answers.device == "cpu" else ""
    rank = " --machine_rank RANK" if answers.num_machines > 1 else ""
    return f"{on_cpu}accelerate launch --config_file {path}{rank} train.py"
