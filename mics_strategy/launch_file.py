"""Configuration file of `accelerate launch --config_file`.

The answers to a few questions, checked one by one, or their defaults become a commented file. The unmodified launcher
reads the file, and `mics_strategy.accelerate` reads what the launcher passes on.
"""

from __future__ import annotations

import os
import re
import shlex
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
_SIZE_WORDS = ("auto", "node", "world")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?")
_CLASSES = re.compile(r"[A-Za-z_]\w*(, ?[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAnswers:
    """Settings of a job.

    Attributes:
        device: "gpu" or "cpu".
        num_machines: Number of machines, at least 1.
        processes_per_machine: Number of processes per machine, one per GPU.
        address: Address of the first machine; empty for a single machine.
        port: Port of the first machine; 0 for a free port on a single machine.
        precision: "bf16", "fp16" or "no".
        preset: Preset of `ShardConfig`, or "auto".
        partition_size: Partition size of `ShardConfig`.
        layer_class: Classes of the model's layers, comma-separated; empty to detect them.

    Raises:
        ConfigError: A value is invalid, or values contradict each other.
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
        for name, noun in (("num_machines", "machines"), ("processes_per_machine", "processes")):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}={getattr(self, name)}` is not a number of {noun}. Use 1 or more.")
        if self.num_machines > 1 and not _HOST.fullmatch(self.address):
            raise ConfigError(
                f"`address={self.address!r}` is not an address at which {self.num_machines} machines can reach the "
                "first one. Use its IP address or its host name, such as 10.0.0.1."
            )
        if not (self.num_machines == 1 and self.port == 0) and not 1 <= self.port <= 65535:
            raise ConfigError(f"`port={self.port}` is not a port that all machines can use. Use 1024 to 65535.")
        _check_choice("precision", self.precision, _PRECISIONS[self.device])
        config = ShardConfig.preset(self.preset, partition_size=self.partition_size)
        if not config.is_auto:
            world_size = self.num_machines * self.processes_per_machine
            resolve_scopes(config, Topology(ranks_per_node=self.processes_per_machine), world_size)
        if self.layer_class and not _CLASSES.fullmatch(self.layer_class):
            raise ConfigError(
                f"`layer_class={self.layer_class!r}` is not the name of a class. Use a name such as LlamaDecoderLayer, "
                "or leave it empty."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Question for a field of `LaunchAnswers`, and the parser of its answer."""

    field: str
    text: str
    read: Callable[[str], str | int]
    only_with_several_machines: bool = False


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number. Use digits only.") from None


def _size(text: str) -> str | int:
    return text if text in _SIZE_WORDS else _number(text)


_QUESTIONS = (
    _Question(field="device", text="Train on gpu or cpu?", read=str.lower),
    _Question(field="num_machines", text="How many machines?", read=_number),
    _Question(field="processes_per_machine", text="How many processes on each, one per GPU?", read=_number),
    _Question(
        field="address",
        text="Address of the first machine, as seen by the others?",
        read=str,
        only_with_several_machines=True,
    ),
    _Question(field="port", text="A free port of the first machine?", read=_number, only_with_several_machines=True),
    _Question(field="precision", text="Compute in bf16, in fp16, or in no lower precision (no)?", read=str.lower),
    _Question(field="preset", text="Which preset (mics, zero1, zero2, zero3, zeropp, paro-iig, auto, ...)?", read=str),
    _Question(field="partition_size", text="Shard over how many ranks (auto, node, world or a number)?", read=_size),
    _Question(field="layer_class", text="Class of the model's layers (empty: detect them)?", read=str),
)


def default_answers() -> LaunchAnswers:
    """One machine with all its GPUs in bf16, or with two CPU processes."""
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        return LaunchAnswers(device="gpu", processes_per_machine=num_gpus, precision="bf16")
    return LaunchAnswers(device="cpu", processes_per_machine=2, precision="no")


def prompt(read_line: Callable[[str], str], show_error: Callable[[str], None]) -> LaunchAnswers:
    """Ask every question until its answer fits the earlier ones.

    Args:
        read_line: Function that shows a question and returns the typed text; empty for the default.
        show_error: Function that shows why an answer does not fit.

    Raises:
        ConfigError: `read_line` has no more input.
    """
    answers: dict[str, str | int] = {}
    defaults = {field.name: getattr(default_answers(), field.name) for field in fields(LaunchAnswers)}
    for question in _QUESTIONS:
        if question.only_with_several_machines and answers["num_machines"] == 1:
            continue
        default = _default_of(question.field, answers, defaults)
        while True:
            try:
                typed = read_line(f"{question.text} [{default}] ").strip()
            except EOFError:
                raise ConfigError(
                    f"The answers end before `{question.field}`. Answer all questions, or use `--defaults`."
                ) from None
            try:
                answers[question.field] = question.read(typed) if typed else default
                _check_partial(answers, defaults)
                break
            except ConfigError as error:
                show_error(str(error))
    return LaunchAnswers(**answers)  # type: ignore[arg-type]


def _default_of(field: str, answers: dict[str, str | int], defaults: dict[str, str | int]) -> str | int:
    """Return the value of an empty answer, given the earlier answers."""
    if field == "processes_per_machine" and answers["device"] == "gpu":
        return torch.cuda.device_count() or 8
    if field == "port":
        return 29500
    if field == "precision":
        return _PRECISIONS[str(answers["device"])][0]
    return defaults[field]


def _check_partial(answers: dict[str, str | int], defaults: dict[str, str | int]) -> None:
    """Refuse answers that no later answer could make valid."""
    placeholders = {
        **defaults,
        "address": "later",
        "port": 29500,
        "precision": "no",
        "processes_per_machine": 1,
    }
    LaunchAnswers(**{**placeholders, **answers})  # type: ignore[arg-type]


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"`{name}={value}` is not available. Use {' or '.join(choices)}.")


def write_launch_file(path: Path, answers: LaunchAnswers, *, overwrites: bool = False) -> None:
    """Write the file atomically.

    Raises:
        ConfigError: The file exists already, or its folder does not exist.
    """
    if path.exists() and not overwrites:
        raise ConfigError(f"`{path}` exists. Use `--force` to overwrite it, or `--output` for another name.")
    if not path.parent.is_dir():
        raise ConfigError(f"`{path.parent}` is not a folder. Create it, or use `--output` for another path.")
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(launch_text(answers))
        os.replace(draft, path)
    except OSError as error:
        error.filename = str(path)  # the draft is not what the user named
        raise


def launch_text(answers: LaunchAnswers) -> str:
    """Return the text of the file."""
    several = answers.num_machines > 1
    lines = [
        "# Read by `accelerate launch --config_file`; written by `mics config`.",
        *("compute_environment: LOCAL_MACHINE", "distributed_type: FSDP"),
        f"mixed_precision: '{answers.precision}'  # bf16, fp16 or 'no'; transformers.Trainer reads its own `bf16=True`",
        f"use_cpu: {str(answers.device == 'cpu').lower()}",
        f"num_machines: {answers.num_machines}",
        f"num_processes: {answers.num_machines * answers.processes_per_machine}  # on all machines",
        f"machine_rank: 0{'  # another on each machine: --machine_rank 1' if several else ''}",
        *([f"main_process_ip: '{answers.address}'"] if several else []),
        f"main_process_port: {answers.port}{'' if several else '  # 0: a free one'}",
        *(["same_network: true  # main_process_ip is reached from every machine"] if several else []),
        "fsdp_config:",
        "  fsdp_version: mics  # without mics_strategy the script stops instead of training with FSDP",
        *_layer_lines(answers.layer_class),
        "  # true: from_pretrained reads weights on one rank per node only; then a script must not move its model",
        "  fsdp_cpu_ram_efficient_loading: false",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT  # format of save_state; FULL_STATE_DICT: one file",
        "  fsdp_activation_checkpointing: false  # true: recompute the layers' activations in the backward",
        "  fsdp_sharding_strategy:  # any option of mics_strategy.ShardConfig",
        f"    preset: {answers.preset}",
        f"    partition_size: {answers.partition_size}  # ranks that share one copy; auto: the fewest that fit",
        "    # topology: {nodes_per_switch: 4}  # leaf switches; default: all nodes are equally near",
        "    # reduce_dtype: bfloat16  # default: gradients are reduced in float32",
        "    # param_dtype: float32  # default: bf16 and fp16 gather 16 bits; this is autocast over float32 instead",
    ]
    return "\n".join(lines) + "\n"


def _layer_lines(layer_class: str) -> list[str]:
    if layer_class:
        return [f"  fsdp_transformer_layer_cls_to_wrap: {layer_class}  # each layer is gathered separately"]
    return ["  # fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer  # default: repeated layers are detected"]


def launch_line(path: Path, answers: LaunchAnswers) -> str:
    """Return the command that starts the job."""
    on_cpu = "ACCELERATE_USE_CPU=true " if answers.device == "cpu" else ""
    rank = " --machine_rank RANK" if answers.num_machines > 1 else ""
    return f"{on_cpu}accelerate launch --config_file {shlex.quote(str(path))}{rank} train.py"
