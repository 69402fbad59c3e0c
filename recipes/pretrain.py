"""Pretraining from a recipe: `mics pretrain llama-demo`, or `python -m recipes.pretrain llama-demo`.

1. Read the recipe; work out ranks and batches, so that what cannot work fails before anything starts.
2. Prepare the data, or find it prepared, before ranks are launched.
3. Train: any Lightning strategy, chosen by name in the recipe; Lightning starts the ranks.
4. Report: the fall of the loss, a text, planned against sent bytes.

Lightning starts the other ranks with this same command; they pass through 1 and 2 as well and find the data
there.
"""

import errno
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Trainer, seed_everything

from mics_strategy.errors import MiCSError, command_error

from .batch import BatchPlan, batch_plan
from .catalog import catalog, catalog_json, catalog_table
from .config import Recipe, TrainerConfig, load_recipe
from .data.loaders import TrainLoader, ValidationLoader
from .data.prepare import PreparedData, objective_of, prepare
from .dry_run import dry_run
from .environment import write_environment
from .errors import RecipeError
from .files import find_recipe
from .flops import peak_tflop_per_s
from .hf_export import TOKENIZER, HFExport
from .lightning_module import Pretraining
from .loggers import Loggers, check_loggers
from .memory import planned_machines
from .metrics import MetricsLog, RunFacts
from .metrics_files import CSV, JSONL
from .models.build import num_parameters
from .models.cost import sample_cost
from .plan_advice import plan_advice
from .ranks import start_ranks
from .rates import Throughput
from .report import ClosingReport
from .resume import SaveOnSignal, check_same_model, checkpoint_to_resume, progress_callbacks
from .run_inputs import RunInputs
from .signals import SaveRequests
from .strategy import build_strategy, described, is_ours

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

# Variables that say where the first node is, or from which Lightning finds out: torchrun and others, SLURM, LSF, MPI.
_LAUNCHERS = ("MASTER_ADDR", "SLURM_JOB_ID", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; what a user can repair ends it with one line instead of a traceback.

    Args:
        arguments: `RECIPE [--ci] [--dry-run] [--plan CLUSTER] [options]`, `--config FILE` in place of `RECIPE`, or
            `--list [--json]`; default: those of the process. A recipe is the path of a YAML file or the name of one of
            the project's.
    """
    _quiet_lightning()
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    named = [*given]  # where the recipe is not yet the path of its file
    try:
        if "--list" in given:
            print(_listing(given))
            return
        if not given:
            raise RecipeError("No recipe was given. Name one, as in `mics pretrain llama-debug`; `--list` shows all.")
        if not given[0].startswith("-"):
            given[0] = f"--config={find_recipe(given[0])}"
        if "--plan" in given:
            print(_plan(given))
            return
        if "--dry-run" in given:
            print(_dry_run([argument for argument in given if argument != "--dry-run"]))
            return
        pretrain(load_recipe(given, has_cuda=torch.cuda.is_available()), named)
    except (MiCSError, OSError) as error:
        sys.exit(command_error("pretrain", error))


def _listing(arguments: Sequence[str]) -> str:
    """Return the catalog as `--list` prints it."""
    others = [argument for argument in arguments if argument not in ("--list", "--json")]
    if others:
        raise RecipeError(f"`--list` was given with {' '.join(others)}. It takes `--json` alone.")
    entries = catalog()
    return catalog_json(entries) if "--json" in arguments else catalog_table(entries)


def _plan(arguments: Sequence[str]) -> str:
    """Return the planner's answer for `--plan CLUSTER`."""
    position = arguments.index("--plan")
    cluster, others = arguments[position + 1 : position + 2], [*arguments[:position], *arguments[position + 2 :]]
    if not cluster or cluster[0].startswith("--"):
        raise RecipeError(
            "`--plan` was given without a cluster. Name one, for example `--plan p4d.24xlarge`, or a file."
        )
    return plan_advice(load_recipe(others, has_cuda=torch.cuda.is_available()), cluster[0])


def _dry_run(arguments: Sequence[str]) -> str:
    """Return the report of `--dry-run`, or refuse what a run would refuse."""
    recipe = load_recipe(arguments, has_cuda=torch.cuda.is_available())
    _, checkpoint = _checked(recipe)
    report, start = dry_run(recipe), "starts from the beginning" if checkpoint is None else f"continues {checkpoint}"
    try:
        _check_launcher(planned_machines(recipe).world_size, recipe.trainer)
    except RecipeError as error:  # the plan is for other machines, where a launcher may be
        if _is_launched(recipe.trainer) and recipe.trainer.devices != "auto":
            raise
        start = f"{start}. Started like this, it would be refused: {error}"
    return f"{report}\nnothing was started; the run {start}"


def _checked(recipe: Recipe) -> "tuple[Strategy | str, Path | None]":
    """Return the strategy of a run and the checkpoint that it continues, or refuse what is wrong on any machines."""
    check_loggers(recipe.trainer.loggers)
    if recipe.trainer.framework == "accelerate":
        from .accelerate_loop import check_recipe  # patches Accelerate, which runs with Lightning do not need

        check_recipe(recipe)
    strategy = build_strategy(recipe.strategy, recipe.trainer.checkpoint_format)
    for folder in (recipe.trainer.output_dir, recipe.data.cache_dir):
        if next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists()).is_file():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    checkpoint = checkpoint_to_resume(recipe.trainer, reads_folders=is_ours(recipe.strategy))
    if checkpoint is not None:
        check_same_model(asdict(recipe.model), Path(recipe.trainer.output_dir))
    return strategy, checkpoint


def pretrain(recipe: Recipe, arguments: Sequence[str] = ()) -> None:
    """Train one recipe from beginning to end, on every rank.

    Args:
        recipe: The resolved recipe.
        arguments: Arguments of the program, with which the ranks of Accelerate are started.
    """
    plan = batch_plan(recipe, num_devices(recipe) * recipe.trainer.num_nodes)
    _check_launcher(plan.world_size, recipe.trainer)
    strategy, checkpoint = _checked(recipe)
    uses_accelerate = recipe.trainer.framework == "accelerate"
    if uses_accelerate:
        from . import accelerate_loop
    data = prepare(recipe.data, recipe.model.vocab_rows, objective_of(recipe.model.family))
    if uses_accelerate and accelerate_loop.needs_ranks(plan, recipe.trainer.num_nodes):
        sys.exit(start_ranks(plan.world_size, f"{__package__}.pretrain", arguments))
    requests = SaveRequests(saves=recipe.trainer.checkpoint_every_steps != "never")
    requests.install()
    if _is_first_process():
        _announce(recipe, plan, data, checkpoint)
    folder = Path(recipe.trainer.output_dir)
    loggers = Loggers(recipe.trainer.loggers, folder, recipe.name, asdict(recipe))
    metrics = MetricsLog(_run_facts(recipe, plan, data), loggers)
    export = HFExport(recipe, data.tokenizer) if recipe.trainer.export_hf and data.tokenizer is not None else None
    report = ClosingReport(
        metrics.history, data.tokenizer, recipe.sample, recipe.data.sequence_length, folder=folder, export=export
    )
    seed_everything(recipe.trainer.seed, verbose=False)
    inputs = RunInputs(plan=plan, data=data, metrics=metrics, report=report, requests=requests, checkpoint=checkpoint)
    try:
        if uses_accelerate:
            accelerate_loop.train(recipe, inputs)
        else:
            _train_with_lightning(recipe, inputs, strategy)
    finally:
        requests.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # Lightning leaves it to the exit, where NCCL complains
    if requests.stopped_at:
        if _is_first_process():
            print(requests.describe(requests.stopped_by, requests.stopped_at, arguments), flush=True)
            if requests.exit_code:  # of another rank, it would make Lightning kill this one
                sys.exit(requests.exit_code)


def _train_with_lightning(recipe: Recipe, inputs: RunInputs, strategy: "Strategy | str") -> None:
    plan, data = inputs.plan, inputs.data
    trainer = Trainer(
        accelerator=recipe.trainer.accelerator,
        devices=num_devices(recipe),
        num_nodes=recipe.trainer.num_nodes,
        strategy=strategy,
        precision=recipe.trainer.precision,
        max_steps=recipe.trainer.max_steps,
        accumulate_grad_batches=plan.accumulation,
        use_distributed_sampler=False,  # the loaders know their rank
        num_sanity_val_steps=-1,  # the validation loss before training
        callbacks=[
            inputs.metrics,
            SaveOnSignal(inputs.requests, recipe.trainer),
            inputs.report,
            *progress_callbacks(recipe.trainer, plan.accumulation),
        ],
        enable_checkpointing=recipe.trainer.checkpoint_every_steps != "never",
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=recipe.trainer.output_dir,
    )
    loader = TrainLoader(data.train, plan, trainer.global_rank, recipe.trainer.max_steps, recipe.trainer.seed)
    validation = ValidationLoader(data.validation, plan, trainer.global_rank, recipe.data.validation_sequences)
    trainer.fit(
        Pretraining(recipe),
        loader,
        validation if recipe.data.validation_sequences else None,
        ckpt_path=inputs.checkpoint,
    )


def num_devices(recipe: Recipe) -> int:
    """Return the ranks on this machine."""
    if recipe.trainer.devices != "auto":
        return recipe.trainer.devices
    return max(1, torch.cuda.device_count()) if recipe.trainer.accelerator != "cpu" else 1


def _check_launcher(world_size: int, config: TrainerConfig) -> None:
    """Refuse several nodes without a launcher, and ranks of a launcher that are not those of the recipe.

    Raises:
        RecipeError: Nodes would wait for one another, or the number of ranks differs, on every rank alike.
    """
    if config.num_nodes > 1 and not any(name in os.environ for name in _LAUNCHERS):
        raise RecipeError(
            f"The recipe is for {config.num_nodes} nodes (`trainer.num_nodes`), but this process was started without a "
            "launcher, so no other node takes part. Start it with torchrun on every node (see docs/recipes.md), or use "
            "`--trainer.num_nodes=1`."
        )
    started = int(os.environ["WORLD_SIZE"]) if _is_launched(config) else world_size
    if started != world_size:
        raise RecipeError(
            f"The recipe is for {world_size} ranks (`trainer.num_nodes` times `trainer.devices`), but the "
            f"launcher started {started}. Set `--trainer.num_nodes` and `--trainer.devices` to its nodes and "
            "ranks of a node."
        )


def _is_launched(config: TrainerConfig) -> bool:
    """Say whether a launcher states the number of ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ or (config.framework == "accelerate" and "WORLD_SIZE" in os.environ)


def _run_facts(recipe: Recipe, plan: BatchPlan, data: PreparedData) -> RunFacts:
    peak = recipe.trainer.peak_tflop_per_s
    if peak == "auto":
        on_cuda = torch.cuda.is_available() and recipe.trainer.accelerator != "cpu"
        has_table = on_cuda and recipe.trainer.precision != "32-true"  # the table is of 16 bits
        peak = peak_tflop_per_s(torch.cuda.get_device_name()) if has_table else 0.0
    cost = sample_cost(recipe.model, recipe.sample_size)
    return RunFacts(
        throughput=Throughput(plan=plan, cost=cost, peak_tflop_per_s=peak),
        max_steps=recipe.trainer.max_steps,
        log_every_steps=recipe.trainer.log_every_steps,
        bytes_per_token=0.0 if recipe.model.is_masked else data.bytes_per_token,
        output_dir=Path(recipe.trainer.output_dir),
    )


def _announce(recipe: Recipe, plan: BatchPlan, data: PreparedData, checkpoint: Path | None) -> None:
    """Say what will happen, and keep the resolved recipe beside its results."""
    output_dir = Path(recipe.trainer.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "config.yaml").write_text(recipe.to_yaml())
    write_environment(output_dir, recipe, plan.world_size)
    if checkpoint is None:
        for name in (JSONL, CSV):
            (output_dir / name).unlink(missing_ok=True)
    if data.tokenizer is not None:
        data.tokenizer.save(str(output_dir / TOKENIZER))
    parameters = num_parameters(recipe.model, recipe.sample_size)
    epochs = recipe.trainer.max_steps * plan.global_size / data.train.num_samples
    lines = [
        f"{recipe.name}: {recipe.model.family}, {parameters / 1e6:.2f} M parameters",
        f"strategy {described(recipe.strategy)}, {plan.world_size} ranks, {recipe.trainer.precision}",
        f"data: {data.origin}",
        f"batch: {plan}",
        f"{recipe.trainer.max_steps} steps, {epochs:.1f} epochs; results in {output_dir}",
        _checkpoints(recipe.trainer),
    ]
    if checkpoint is not None:
        lines.append(f"continues {checkpoint}")
    if data.floor_nats and not recipe.model.is_masked:
        lines.append(f"no model can reach a loss below {data.floor_nats:.3f} on this text")
    print("\n".join([*lines, f"starting {plan.world_size} ranks ..."]), flush=True)


def _checkpoints(config: TrainerConfig) -> str:
    if config.checkpoint_every_steps == "never":
        return (
            "checkpoints: none, so that a run that is stopped is lost; `--trainer.checkpoint_every_steps=100` keeps it"
        )
    return f"checkpoints: every {config.checkpoint_every_steps} steps, and when the run is stopped"


def _is_first_process() -> bool:
    """Say whether this process was started by the user, or is the first of those started by a launcher."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def _quiet_lightning() -> None:
    """Drop Lightning's notes on choices that a recipe makes on purpose."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "does not have many workers",  # our loaders read memory maps
        "Skipping val loop",
        "callbacks used to create the checkpoint",  # a run may resume without writing checkpoints itself
        "LeafSpec",  # Lightning 2.6 on torch 2.13; nothing that we call
    ):
        warnings.filterwarnings("ignore", message=f".*{message}")


if __name__ == "__main__":
    main()
