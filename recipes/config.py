"""The fields of a recipe, and how a file and a command line fill them.

One frozen dataclass per subject. A YAML file fills them, dotted options on the command line override single
fields (`--optimizer.lr=1e-3`), an unknown name is an error, and `--print_config` shows the result with all
defaults. A recipe is data: see `plain_data`.
"""

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from . import command_line
from .data.config import DataConfig
from .errors import RecipeError
from .errors import require as _require
from .loggers import LoggerName
from .models.config import CAUSAL_FAMILIES, ModelConfig
from .plain_data import Plain, build, dump, mapping_of, merge, parse, read_file, shown, typed
from .schedule import ScheduleName, lr_share
from .strategy import StrategyConfig, is_ours

_DESCRIPTION = "Pretrain a model: RECIPE (name or file) [--ci] [--dry-run] [options], or --list [--json]."


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Samples or tokens per optimizer step; accumulation follows from them and the number of ranks.

    Args:
        global_size: sequences in one optimizer step, over all ranks and micro-steps; `auto` where `global_tokens` is
            given.
        global_tokens: tokens in one optimizer step, a multiple of `data.sequence_length`; `auto` where `global_size` is
            given.
        micro_size: sequences that a rank holds in one forward and backward.
    """

    global_size: int | Literal["auto"] = 8
    global_tokens: int | Literal["auto"] = "auto"
    micro_size: int = 1

    def __post_init__(self) -> None:
        """Refuse empty batches, and two sizes or none."""
        sizes = {"global_size": self.global_size, "global_tokens": self.global_tokens}
        if [*sizes.values()].count("auto") != 1:
            raise RecipeError(
                f"`batch.global_size={self.global_size}` and `batch.global_tokens={self.global_tokens}` cannot be used "
                "together: exactly one of them is a number. Set the other one to `auto`, for example "
                "`--batch.global_size=auto --batch.global_tokens=65536`."
            )
        for name, size in sizes.items():
            _require(size == "auto" or size >= 1, f"batch.{name}", size, "at least 1")
        _require(self.micro_size >= 1, "batch.micro_size", self.micro_size, "at least 1")

    def samples(self, sequence_length: int | None) -> int:
        """Return the sequences or images in one optimizer step.

        Args:
            sequence_length: Tokens of a sequence; None for images.

        Raises:
            RecipeError: Tokens are given for images, or no whole number of sequences.
        """
        if self.global_size != "auto":
            return self.global_size
        tokens = int(self.global_tokens)
        if sequence_length is None:
            raise RecipeError(
                f"`batch.global_tokens={tokens}` was given, but this family reads images, which have no tokens. Give "
                "the images of a step: `--batch.global_tokens=auto --batch.global_size=256`."
            )
        if tokens % sequence_length:
            nearest = max(1, round(tokens / sequence_length)) * sequence_length
            raise RecipeError(
                f"`batch.global_tokens={tokens}` is not a whole number of sequences of "
                f"`data.sequence_length={sequence_length}` tokens. Use `--batch.global_tokens={nearest}`."
            )
        return tokens // sequence_length


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW.

    Args:
        lr: peak learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: for matrices; norms, biases and embeddings have none.
        clip_norm: largest norm of the gradient of all parameters together; `.inf` only measures it.
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over time.

    Args:
        name: shape after the warm-up.
        warmup_steps: optimizer steps of linear growth.
        decay_steps: optimizer steps of the final fall of `wsd`.
        floor: share of the peak that is left at the end.
        total_steps: length of the schedule; `auto` is `trainer.max_steps`. A number keeps the learning rates
            of a long run when only its beginning is run.
    """

    name: ScheduleName = "cosine"
    warmup_steps: int = 20
    decay_steps: int = 0
    floor: float = 0.1
    total_steps: int | Literal["auto"] = "auto"

    def share(self, step: int, max_steps: int) -> float:
        """Return the learning rate after so many optimizer steps, as a share of its peak.

        Args:
            step: Optimizer steps already taken.
            max_steps: Optimizer steps of the run.
        """
        total = max_steps if self.total_steps == "auto" else self.total_steps
        return lr_share(
            self.name, step, total=total, warmup=self.warmup_steps, decay=self.decay_steps, floor=self.floor
        )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The run.

    Args:
        framework: `lightning` or `accelerate`; both train alike. Each continues its own checkpoints only.
        accelerator: `auto` takes CUDA when there is a GPU.
        devices: ranks on this machine; `auto` is the number of GPUs, or 1 without any.
        num_nodes: machines.
        precision: as in Lightning; mixed precision gathers 16 bits and updates in float32.
        max_steps: optimizer steps.
        log_every_steps: optimizer steps between two lines of the log.
        validate_every_steps: optimizer steps between two validations; `never` validates before and after training
            only.
        seed: of the weights and of the order of the data.
        output_dir: folder for metrics, the resolved config and checkpoints.
        checkpoint_every_steps: optimizer steps between two checkpoints, or `never`; the last step is saved, too.
            SIGUSR1 asks for one more, SIGTERM and SIGINT for one and the end of the run.
        checkpoint_format: `full` is one file, which rank 0 writes; `sharded` a folder to which every rank writes while
            training goes on (`mics` only). A run resumes from either, on any number of ranks.
        resume: `auto` continues the last checkpoint in `output_dir` if there is one; `never` starts from the beginning.
        peak_tflop_per_s: Peak of one device, for the utilisation (MFU). `auto` looks up the dense 16-bit peak; without
            16 bits, or of a device that is not known, no utilisation is shown.
        export_hf: Whether the trained model is written for transformers, to the folder `hf` of `output_dir`; text
            families under a `mics` strategy, `auto` or `ddp`.
        loggers: `tensorboard`, `wandb`, or both, besides metrics.csv and metrics.jsonl.
    """

    framework: Literal["lightning", "accelerate"] = "lightning"
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    devices: int | Literal["auto"] = "auto"
    num_nodes: int = 1
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"] = "32-true"
    max_steps: int = 300
    log_every_steps: int = 10
    validate_every_steps: int | Literal["never"] = "never"
    seed: int = 1
    output_dir: str = "runs/pretrain"
    checkpoint_every_steps: int | Literal["never"] = "never"
    checkpoint_format: Literal["full", "sharded"] = "full"
    resume: Literal["auto", "never"] = "never"
    peak_tflop_per_s: float | Literal["auto"] = "auto"
    export_hf: bool = False
    loggers: tuple[LoggerName, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a run without steps."""
        for name in ("max_steps", "log_every_steps", "num_nodes"):
            _require(getattr(self, name) >= 1, f"trainer.{name}", getattr(self, name), "at least 1")
        for name in ("validate_every_steps", "checkpoint_every_steps"):
            every = getattr(self, name)
            _require(every == "never" or every >= 1, f"trainer.{name}", every, "`never` or at least 1")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Text written by the trained model at the end.

    Args:
        prompt: how the text begins; without a space at the end, because tokens begin with their space.
        num_tokens: tokens to write; 0 writes nothing.
        temperature: 0 takes the likeliest token each time, larger values are bolder.
    """

    prompt: str = "The"
    num_tokens: int = 60
    temperature: float = 0.7


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The machines that a recipe is meant for; the run itself asks the launcher.

    Args:
        name: Name of the machines, with the paper that used them where there is one.
        ranks_per_node: GPUs of one machine, or CPU processes.
        memory_gb: Memory of one GPU, 1 GB = 1e9 bytes; 0 where it is not a GPU.
    """

    name: str = "any machine"
    ranks_per_node: int = 1
    memory_gb: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ExpectedConfig:
    """Facts of a recipe that tests compare with the code; a run does not read them.

    Args:
        num_parameters: Exact number of parameters, tied ones once.
        rank_gb: Memory of a rank on the cluster, 1 GB = 1e9 bytes: the engine, optimizer states, communicators and an
            estimate of the activations; 0 where the cluster has no GPUs.
        fits: Whether that is at most `cluster.memory_gb`.
    """

    num_parameters: int = 0
    rank_gb: float = 0.0
    fits: bool = True


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete pretraining run.

    Args:
        name: Name in the log and for `mics pretrain`: folder and file, joined by a hyphen.
        model: Network.
        data: Text or images.
        batch: Samples per step.
        optimizer: Update rule.
        schedule: Learning rate over time.
        strategy: Sharding.
        trainer: Ranks, precision and length.
        sample: Text that the model writes afterwards.
        cluster: Machines that the recipe is meant for.
        expected: Facts that tests compare with the code.
        cuda: Fields with other values when this recipe runs on GPUs, nested as above.
        ci: Fields with other values under `--ci`: a few layers and two steps on two CPU ranks.
    """

    name: str
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    expected: ExpectedConfig = field(default_factory=ExpectedConfig)
    cuda: dict[str, Plain] = field(default_factory=dict)
    ci: dict[str, Plain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a name that is no folder's, and options of different blocks that contradict each other."""
        is_name = self.name.isprintable() and "/" not in self.name and re.search(r"[A-Za-z0-9]", self.name)
        _require(bool(is_name), "name", self.name, "one line with a letter or a digit, without slashes")
        self._check_family()
        self.global_batch  # noqa: B018  # raises where tokens and sequences do not fit
        if self.model.meta_start and not is_ours(self.strategy):
            raise RecipeError(
                f"`model.meta_start=true` with `strategy.name={self.strategy.name}`: only `mics` strategies "
                "initialize a model that was built without memory. Use `--model.meta_start=false` or a `mics` one."
            )

        if self.trainer.export_hf:
            self._check_export()

    @property
    def global_batch(self) -> int:
        """Sequences or images in one optimizer step, over all ranks."""
        return self.batch.samples(None if self.model.reads_images else self.data.sequence_length)

    @property
    def sample_size(self) -> int:
        """Tokens of a sequence, or pixels along the edge of an image."""
        return self.data.images.size if self.model.reads_images else self.data.sequence_length

    def _check_export(self) -> None:
        if self.model.reads_images:
            raise RecipeError(
                f"`trainer.export_hf=true` with `model.family={self.model.family}`: transformers does not have this "
                "family. Use `--trainer.export_hf=false` and checkpoints; docs/runs.md says how to read them."
            )
        name = self.strategy.name
        if not is_ours(self.strategy) and name != "auto" and not name.startswith("ddp"):
            raise RecipeError(
                f"`trainer.export_hf=true` with `strategy.name={name}`: no rank has all weights at the end. Use a "
                "`mics` strategy or `ddp`, or `--trainer.export_hf=false`."
            )

    def _check_family(self) -> None:
        model, data = self.model, self.data
        if model.reads_images != (data.source == "synthetic_images"):
            kind = "images: use `data.source=synthetic_images`" if model.reads_images else "text: use another source"
            raise RecipeError(
                f"`data.source={data.source}` with `model.family={model.family}`: this family reads {kind}."
            )
        if model.family not in CAUSAL_FAMILIES and self.sample.num_tokens:
            raise RecipeError(
                f"`sample.num_tokens={self.sample.num_tokens}` with `model.family={model.family}`: only "
                f"{' and '.join(CAUSAL_FAMILIES)} write text. Use `--sample.num_tokens=0`."
            )
        if model.reads_images:
            images = data.images
            _require(images.channels == 3, "data.images.channels", images.channels, f"3 for {model.family}")
            classes = f"at most `model.num_classes={model.num_classes}`"
            _require(images.num_classes <= model.num_classes, "data.images.num_classes", images.num_classes, classes)
        elif model.max_positions != "auto":
            model.positions(data.sequence_length)

    def to_yaml(self) -> str:
        """Return this recipe as a file that `--config` reads back."""
        return dump(asdict(self))


def load_recipe(arguments: Sequence[str], *, has_cuda: bool) -> Recipe:
    """Read a recipe from a command line.

    Args:
        arguments: `--config FILE` (repeatable, later files win), `--ci`, then dotted overrides.
        has_cuda: Whether this machine has a GPU; then the recipe's `cuda` block applies, unless the accelerator is
            `cpu`.

    Returns:
        The resolved recipe. Overrides on the command line win over the `ci` block under `--ci`, that over the `cuda`
        block, and that over the file.

    Raises:
        RecipeError: A name is unknown, a value cannot be used, or `--ci` was given and the recipe has no such block.
        SystemExit: `--help` and `--print_config` (0).
    """
    options = command_line.split(arguments)
    if "help" in options.flags:
        print(command_line.help_text(Recipe, "mics pretrain", _DESCRIPTION), end="")
        sys.exit(0)
    values: dict[str, Any] = {}
    for text in options.configs:
        values = merge(values, _fields_of(text), Recipe)
    blocks = ("cuda",) * has_cuda + ("ci",) * ("ci" in options.flags)
    recipe = resolve(values, typed(options.overrides, Recipe), blocks)
    if "print_config" in options.flags:
        print(recipe.to_yaml(), end="")
        sys.exit(0)
    return recipe


def _fields_of(config: str) -> dict[str, Any]:
    """Return the typed fields of a file or an inline mapping; errors name it."""
    is_inline, where = config.startswith("{"), "`--config`"
    file = mapping_of(parse(config, where), Recipe, where) if is_inline else read_file(Path(config), Recipe)
    try:
        fields = typed(file, Recipe)
        for name in ("cuda", "ci"):
            _block(name, fields)
    except RecipeError as error:
        raise RecipeError(f"{where if is_inline else f'`{config}`'}: {error}") from None
    return fields


def resolve(values: Mapping[str, Any], overrides: Mapping[str, Any], blocks: Collection[str]) -> Recipe:
    """Make a recipe of the typed fields of its file.

    Args:
        values: Fields of the file.
        overrides: Fields of the command line, which win.
        blocks: Blocks of the file that apply, `cuda` and `ci`; `cuda` unless the accelerator is `cpu`.

    Raises:
        RecipeError: A name in a block is unknown, a value cannot be used, or there is no block `ci`.
    """
    fields = {name: _block(name, values) for name in ("cuda", "ci")}
    if "ci" in blocks:
        if not fields["ci"]:
            raise RecipeError(f"`--ci` was given, but recipe {shown(values.get('name', ''))} has no block `ci`.")
        overrides = merge(fields["ci"], overrides, Recipe)
    if "cuda" in blocks:
        accelerator = merge(values, overrides, Recipe).get("trainer", {}).get("accelerator", "auto")
        values = values if accelerator == "cpu" else merge(values, fields["cuda"], Recipe)
    return build(merge(values, overrides, Recipe), Recipe)


def _block(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the typed fields of the block `cuda` or `ci`, whether or not this run takes them."""
    block = typed(values.get(name, {}), Recipe, f"{name}.")
    nested = next((inner for inner in ("name", "cuda", "ci") if inner in block), None)
    if nested:
        raise RecipeError(f"`{name}.{nested}` cannot be used: a block has fields of the run. Remove it.")
    return block


def recipe_files(root: Path) -> list[Path]:
    """List every recipe below a folder."""
    return sorted(root.rglob("*.yaml"))
