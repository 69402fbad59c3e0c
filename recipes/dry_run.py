"""What a recipe would do on its machines: plan, memory, batch, schedule, data. No ranks, GPU or text are needed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .batch import BatchPlan, batch_plan
from .config import Recipe
from .data.prepare import COMMAND, objective_of, store_folder
from .memory import Machines, RankMemory, planned_machines, rank_memory
from .models.build import num_parameters
from .strategy import described, is_ours

_STATES_BYTES = 8  # of AdamW's two moments, for each element


def dry_run(recipe: Recipe) -> str:
    """Return the report of `--dry-run`.

    Args:
        recipe: The resolved recipe.

    Raises:
        RecipeError: The ranks cannot share the batch, or the text of the recipe does not exist.
        mics_strategy.errors.ConfigError: The engine refuses the plan.

    Cost:
        The time in which the engine is built on the meta device: seconds for the largest recipes.
    """
    machines = planned_machines(recipe)
    plan = batch_plan(recipe, machines.world_size)
    sections = {
        "run": _run(recipe, machines, plan),
        "schedule": _schedule(recipe),
        "data": _data(recipe),
        **_plan_and_memory(recipe, plan),
    }
    return "\n".join(f"{name}\n" + "\n".join(f"  {line}" for line in lines) for name, lines in sections.items())


def _run(recipe: Recipe, machines: Machines, plan: BatchPlan) -> list[str]:
    trainer, model = recipe.trainer, recipe.model
    samples = trainer.max_steps * plan.global_size
    amount = f"{samples:,} images"
    if plan.unit == "tok":
        amount = f"{samples:,} sequences, {trainer.max_steps * plan.tokens_per_step:,} tokens"
    saves = f"every {trainer.checkpoint_every_steps} steps ({trainer.checkpoint_format})"
    if trainer.checkpoint_every_steps == "never":
        saves = "never"
    validates = "before and after training"
    if trainer.validate_every_steps != "never":
        validates += f", and every {trainer.validate_every_steps} steps"
    if not recipe.data.validation_sequences:
        validates = "never"
    return [
        f"{recipe.name}: {model.family}, {num_parameters(model, recipe.sample_size):,} parameters",
        f"planned for {machines.world_size} ranks, {machines.ranks_per_node} on a node (nodes: {machines.num_nodes}); "
        f"the recipe is meant for {recipe.cluster.name}",
        f"strategy {described(recipe.strategy)}, {trainer.precision}, {trainer.framework}",
        str(plan),
        f"{trainer.max_steps:,} steps: {amount}",
        f"validates {validates}; checkpoints {saves}; results in {trainer.output_dir}",
    ]


def _schedule(recipe: Recipe) -> list[str]:
    schedule, steps, peak = recipe.schedule, recipe.trainer.max_steps, recipe.optimizer.lr
    marks = sorted({0, min(schedule.warmup_steps, steps - 1), steps // 4, steps // 2, 3 * steps // 4, steps - 1})
    rates = [f"step {step + 1:,}: {peak * schedule.share(step, steps):.2e}" for step in marks]
    return [f"{schedule.name}, peak {peak:.2e}, {schedule.warmup_steps:,} steps of warm-up", ", ".join(rates)]


def _data(recipe: Recipe) -> list[str]:
    data = recipe.data
    if data.source == "synthetic_images":
        return [f"{data.images.count:,} synthetic images, drawn while training: nothing to prepare"]
    folder = store_folder(data, recipe.model.vocab_rows, objective_of(recipe.model.family))
    state = "prepared" if folder.is_dir() else f"not prepared on this machine; see `{COMMAND}` in docs/data.md"
    return [f"{data.source}, sequences of {data.sequence_length} tokens", f"{folder}: {state}"]


def _plan_and_memory(recipe: Recipe, plan: BatchPlan) -> dict[str, list[str]]:
    if not is_ours(recipe.strategy):
        line = (
            f"`strategy.name={recipe.strategy.name}` is not planned by this project; use a `mics` strategy for a plan"
        )
        return {"plan": [line]}
    memory = rank_memory(recipe)
    return {"plan": [*_plan(memory, plan)], "memory of a rank on a GPU": [*_memory(recipe, memory)]}


def _plan(memory: RankMemory, plan: BatchPlan) -> Iterator[str]:
    engine = memory.engine
    scopes = engine.scopes
    yield f"{scopes.phrase} ranks; {engine.num_units} units, {engine.num_communicators} communicators"
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in scopes.axes)
    yield f"axes, fastest first: {axes}" if axes else "one rank: nothing is sent"
    planned = engine.plan(plan.accumulation)
    counts: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for collective in planned.collectives:
        counts[collective.axis, collective.collective] += 1
        sent[collective.axis, collective.collective] += collective.sent_bytes
    total, unit = planned.sent_bytes(), _Unit.of(planned.sent_bytes())
    yield f"sent by a rank in one optimizer step of {plan.accumulation} micro-steps:"
    width = max((len(axis) for axis, _ in sent), default=0) + 2
    for (axis, kind), num_bytes in sent.items():
        yield f"  {axis:<{width}}{kind:<16}{counts[axis, kind]:>8,} calls {unit.show(num_bytes)}"
    yield f"  {'total':<{width + 16}}{len(planned.collectives):>8,} calls {unit.show(total)}"


def _memory(recipe: Recipe, memory: RankMemory) -> Iterator[str]:
    engine = memory.engine
    rows = dict(sorted(engine.bytes_by_purpose.items(), key=lambda row: -row[1]))
    rows["gradients of autograd"] = engine.pending_grad_bytes
    rows["AdamW's moments"] = engine.num_trained * _STATES_BYTES
    if recipe.cluster.memory_gb:
        rows[f"communicators ({engine.num_communicators})"] = engine.communicator_bytes
    rows["activations (estimate)"] = memory.activation_bytes
    total, limit_gb = sum(rows.values()), recipe.cluster.memory_gb
    unit = _Unit.of(total)
    for purpose, num_bytes in rows.items():
        yield f"{purpose:<32}{unit.show(num_bytes)}"
    verdict = "" if not limit_gb else f", of {limit_gb:g} GB: {'fits' if total <= limit_gb * 1e9 else 'does NOT fit'}"
    yield f"{'total':<32}{unit.show(total)}{verdict}"
    if recipe.trainer.accelerator == "cpu":
        yield "this recipe is for CPUs, where staging buffers and workspaces are larger: a run prints them at its start"


@dataclass(frozen=True, slots=True)
class _Unit:
    """Unit of the bytes of one table."""

    num_bytes: float
    name: str

    @classmethod
    def of(cls, total_bytes: int) -> "_Unit":
        """Return the unit for a table of this sum."""
        return cls(1e9, "GB") if total_bytes >= 1e8 else cls(1e6, "MB")

    def show(self, num_bytes: int) -> str:
        """Return a right-aligned number with its unit."""
        return f"{num_bytes / self.num_bytes:>12,.3f} {self.name}"
