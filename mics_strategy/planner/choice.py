"""The planner's answer: the fastest configuration, and why the others lost.

Pure, but for `Choice.strategy`, which imports Lightning.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.planner.certainty import Certainty, certainty
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.memory import MicroBatch, RankMemory, rank_memory
from mics_strategy.planner.recompute import Recompute, recompute_phrase, recompute_word
from mics_strategy.planner.report import Section, report_text
from mics_strategy.planner.simulator import (
    Job,
    compute_seconds,
    planned_timeline,
    play,
    sent_bytes,
    step_seconds,
)
from mics_strategy.planner.solver import Point, Solution, solve, tie_order
from mics_strategy.planner.space import EQUAL, Space, advised_presets, overheads_of, preset_of, scopes_of
from mics_strategy.planner.workload import Workload
from mics_strategy.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One optimizer step of a job that did not run, in steady state.

    Attributes:
        job: Training, cluster and configuration.
        step_s: Seconds of the step.
        compute_s: Seconds in which the device computes, if nothing slows it.
        memory: Memory of a rank.
        sent_bytes: Bytes that one rank sends, by axis.
    """

    job: Job
    step_s: float
    compute_s: float
    memory: RankMemory
    sent_bytes: Mapping[str, int]

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second."""
        return self.job.workload.global_batch / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second; samples for images."""
        return self.samples_per_s * self.job.workload.model.tokens_per_sample

    @property
    def tokens_per_s_per_rank(self) -> float:
        """Tokens per second and rank (TGS)."""
        return self.tokens_per_s / self.job.cluster.world_size

    @property
    def model_flop_per_s_per_rank(self) -> float:
        """FLOP per second and rank by the mathematics. Nothing is recomputed, and causal attention is halved."""
        return self.samples_per_s * self.job.workload.model.model_flop_per_sample / self.job.cluster.world_size

    @property
    def mfu(self) -> float:
        """Share of the device's 16-bit peak that the model's FLOP are, 0 to 1."""
        return self.model_flop_per_s_per_rank / self.job.cluster.device.peak_flop_per_s

    @property
    def exposed_s(self) -> float:
        """Seconds in which the device waits for collectives, or is slowed by them."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def certainty(self) -> Certainty:
        """Errors of predictions of public runs that wait about as much."""
        return certainty(self.exposed_s / self.step_s)

    def timeline(self) -> Timeline:
        """The step as a planned timeline of rank 0, every micro-step in it."""
        return planned_timeline(play(self.job, self.job.num_micro_steps), self.job.scopes)


def simulate(
    workload: Workload,
    cluster: Cluster,
    config: ShardConfig,
    *,
    micro_batch: int | None = None,
    recompute: Recompute | None = None,
) -> SimulatedStep:
    """Simulate one optimizer step of a configuration.

    Args:
        workload: Training.
        cluster: Cluster.
        config: Configuration with explicit scopes; dtypes that are ``"auto"`` are those of the workload.
        micro_batch: Samples of one forward on a rank; by default the workload's, which must then be a number.
        recompute: As in `Workload`; by default the workload's.

    Raises:
        ConfigError: A value is left to the planner, or is impossible on this cluster.
    """
    samples = workload.micro_batch if micro_batch is None else micro_batch
    recomputes = workload.recompute if recompute is None else recompute
    if isinstance(samples, str) or recomputes == "auto":
        raise ConfigError(
            f"`micro_batch={samples!r}` and `recompute={recomputes!r}`: a simulation needs values. State both, or "
            "let `plan()` choose them."
        )
    workload = dataclasses.replace(workload, micro_batch=samples, recompute=recomputes)
    workload.micro_batches(cluster.world_size)
    if config.param_dtype == "auto":
        config = config.replace(param_dtype=workload.param_dtype)
    if config.reduce_dtype == "auto":
        config = config.replace(reduce_dtype=workload.reduce_dtype)
    return _simulated(
        Job(
            workload=workload,
            cluster=cluster,
            config=config,
            scopes=scopes_of(config, cluster),
            micro_batch=samples,
            recompute=recomputes,
        )
    )


def _simulated(job: Job) -> SimulatedStep:
    batch = MicroBatch(samples=job.micro_batch, recomputes=job.recompute)
    return SimulatedStep(
        job=job,
        step_s=step_seconds(job),
        compute_s=compute_seconds(job),
        memory=rank_memory(
            job.workload.model, job.config, job.scopes, batch, job.workload.states, overheads_of(job.cluster)
        ),
        sent_bytes=sent_bytes(job),
    )


def plan(workload: Workload, cluster: Cluster, space: Space | None = None, *, is_brief: bool = False) -> Choice:
    """Choose the fastest configuration that fits into the memory of a cluster.

    Args:
        workload: Training, with the choices that are left to the planner.
        cluster: Cluster.
        space: Configurations to choose from; by default every scope, without codecs.
        is_brief: Whether to simulate the few most promising configurations alone.

    Raises:
        ConfigError: The ranks do not divide the batch.
        NoFeasiblePlan: Nothing fits; the error says by how much, and what would make it fit.
    """
    solution = solve(workload, cluster, Space() if space is None else space, is_brief=is_brief)
    return Choice(step=_simulated(solution.frontier[0].job), solution=solution)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fastest configuration that fits, and all others.

    Attributes:
        step: Simulated step of the chosen configuration.
        solution: All points, with the reasons against them.
    """

    step: SimulatedStep
    solution: Solution

    @property
    def config(self) -> ShardConfig:
        """The configuration, for `shard`."""
        return self.step.job.config

    @property
    def micro_batch(self) -> int:
        """Samples of one forward on a rank."""
        return self.step.job.micro_batch

    @property
    def num_micro_steps(self) -> int:
        """Micro-steps of an optimizer step.

        Lightning: `accumulate_grad_batches`. Accelerate: `gradient_accumulation_steps`.
        """
        return self.step.job.num_micro_steps

    @property
    def recompute(self) -> Recompute:
        """Which layers are to be checkpointed, as in `Workload`."""
        return self.step.job.recompute

    def strategy(self, **options: Any) -> Any:
        """The strategy for ``Trainer(strategy=choice.strategy())``.

        Args:
            **options: Arguments of `mics_strategy.lightning.MiCSStrategy`.
        """
        lightning: Any = importlib.import_module("mics_strategy.lightning")
        return lightning.MiCSStrategy(self.config, **options)

    def plugin(self, **options: Any) -> Any:
        """The plug-in for ``Accelerator(fsdp_plugin=choice.plugin())``.

        Args:
            **options: Arguments of `mics_strategy.accelerate.MiCSPlugin`.
        """
        accelerate: Any = importlib.import_module("mics_strategy.accelerate")
        return accelerate.MiCSPlugin(self.config, **options)

    def table(self) -> str:
        """The answer as text."""
        return report_text(self.sections())

    def sections(self) -> tuple[Section, ...]:
        """The answer as sections of a report."""
        return tuple(_sections(self))

    def to_json(self) -> dict[str, Any]:
        """The answer as an object of JSON: numbers in bytes and seconds."""
        return {
            "chosen": step_json(self.step),
            "frontier": [point_json(point) for point in self.solution.frontier],
            "fitting": len(self.solution.fitting),
            "too_large": len(self.solution.too_large),
            "limit_bytes": self.solution.limit_bytes,
            "gap": self.solution.gap,
            "rejected": [
                {**point_json(p), "reason": r, "is_within": _is_within(p, self.step)} for p, r in reasons(self)
            ],
        }


def reasons(choice: Choice) -> Iterator[tuple[Point, str]]:
    """Every point but the chosen one, with the reason against it."""
    best_s, limit_bytes = choice.step.step_s, choice.solution.limit_bytes
    sent: dict[tuple[ShardConfig, int], int] = {}
    equal = [p for p in choice.solution.fitting if p.step_s is not None and p.step_s <= best_s * (1 + EQUAL)]
    least_bytes = min((point.memory.total_bytes for point in equal), default=0)
    chosen_order = tie_order(choice.solution.frontier[0], least_bytes, sent)
    for point in choice.solution.fitting:
        if point.job == choice.step.job:
            continue
        if point.step_s is None:
            prefix = "takes" if point.bound_s >= best_s else "not simulated; takes"
            yield point, f"{prefix} at least {point.bound_s:.4g} s: {_by(point)}"
        elif point.step_s <= best_s * (1 + EQUAL) and (order := tie_order(point, least_bytes, sent)) > chosen_order:
            yield point, order.reason_against(chosen_order)
        else:
            yield point, f"{point.step_s / best_s - 1:.1%} slower"
    for point in choice.solution.too_large:
        over_bytes = point.memory.total_bytes - limit_bytes
        alone = ", by its communicators alone" if over_bytes <= point.memory.by_kind["communicators"] else ""
        yield point, f"{over_bytes / 1e9:.1f} GB too large{alone}"


def _by(point: Point) -> str:
    return "the device computes" if point.bound_by == "compute" else f"the {point.bound_by} links carry its collectives"


def _sections(choice: Choice) -> Iterator[Section]:
    solution = choice.solution
    yield Section(lines=tuple(step_lines(choice.step)))
    header = ("P/G/OS", "secondary", "codecs", "micro-batch", "recompute", "step s", "GB")
    counts = f"Of {len(solution.fitting) + len(solution.too_large):,} points {len(solution.fitting):,} fit."
    if solution.gap >= 5e-4:
        counts += f" One that was not simulated could be {solution.gap:.1%} faster at most."
    systems = fastest_of_systems(choice)
    shown = (point for _, point in systems if point.memory.total_bytes <= solution.limit_bytes)
    less_s = choice.step.step_s * (1 - 1e-4)  # a difference in the digits that are printed
    if any((point.step_s or math.inf) < less_s for point in (*solution.frontier, *shown)):
        rule = "the choice sends least between nodes, or else is the simplest or smallest"
        counts += f" Steps within {EQUAL:.0%} count as equal: of these, {rule}."
    yield Section(
        title="Fastest step by memory",
        rows=(header, *(_point_row(point, choice.step) for point in solution.frontier)),
        num_left=3,
        lines=(counts,),
    )
    marks = []
    if any(_is_within(point, choice.step) for point in solution.fitting):
        interval = f"{choice.step.certainty.interval:.0%}"
        marks.append(f"~: within {interval} of the choice, so that it may be the faster one.")
    if any(point.step_s is None for _, point in systems):
        marks.append(">: takes at least so long; not simulated.")
    reasons_of = {id(point): reason for point, reason in reasons(choice)}
    rows = [(name, *_point_row(point, choice.step), reasons_of.get(id(point), "chosen")) for name, point in systems]
    yield Section(
        title="Published systems, with a node as partition",
        rows=(("preset", *header, "reason"), *rows),
        num_left=4,
        lines=tuple(marks),
    )


def fastest_of_systems(choice: Choice) -> list[tuple[str, Point]]:
    """The fastest point of each published system, fastest first. Where none fits, it is the smallest."""
    points: dict[str, Point] = {}
    for point in (*choice.solution.fitting, *choice.solution.too_large):
        name = preset_of(point.job.scopes)
        if name is None:
            continue
        before = points.setdefault(name, point)
        if (point.step_s or math.inf) < (before.step_s or math.inf):
            points[name] = point
    return sorted(points.items(), key=lambda item: (item[1].step_s or math.inf, item[1].memory.total_bytes))


def step_lines(step: SimulatedStep) -> Iterator[str]:
    """A simulated step as text."""
    job, memory = step.job, step.memory
    scopes, model, tokens = job.scopes, job.workload.model, job.workload.model.tokens_per_sample
    batch = f"{job.workload.global_batch:,} samples"
    batch += f" of {tokens:,} tokens, {tokens * job.workload.global_batch:,} tokens" if tokens > 1 else ""
    yield (
        f"{model.name}, {model.numel / 1e9:.3g} B parameters, on {job.cluster.num_nodes} nodes of "
        f"{job.cluster.ranks_per_node} ({job.cluster.name}); {batch} a step"
    )
    if model.trained_share < 1:
        advised = ", ".join(advised_presets(model.trained_share))
        yield f"{model.trained_share:.2%} of the parameters are trained, for which PaRO advises {advised}"
    yield f"{scopes.phrase} ranks{f', secondary copy over {scopes.secondary}' if scopes.has_secondary else ''}"
    yield (
        f"{_counted(job.num_micro_steps, 'micro-step')} of {_counted(job.micro_batch, 'sample')}"
        f"{recompute_phrase(job.recompute)}"
    )
    yield (
        f"step {step.step_s:.4g} s: compute {step.compute_s:.4g}, waiting and slowed {step.exposed_s:.4g}; "
        f"{step.tokens_per_s:,.0f} {'tokens' if tokens > 1 else 'samples'}/s, {step.tokens_per_s_per_rank:,.0f} per "
        f"rank, {step.model_flop_per_s_per_rank / 1e12:.1f} TFLOPS, MFU {step.mfu:.1%}"
    )
    yield step.certainty.text(step.step_s)
    device = job.cluster.device
    if device.sustained_efficiency < 1:
        yield f"kernels at {device.sustained_efficiency:.0%} of their best speed: {device.sustained_source}"
    if job.cluster.assumed:
        yield f"assumed as in the catalog, as the cluster's file does not state it: {', '.join(job.cluster.assumed)}"
    sent = ", ".join(f"{axis} {_size(num_bytes)}" for axis, num_bytes in step.sent_bytes.items())
    yield f"sent by one rank: {sent or 'nothing'}"
    kinds = sorted(memory.by_kind.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind} {num_bytes / 1e9:.1f}" for kind, num_bytes in kinds if num_bytes >= 5e7)
    limit_gb = job.cluster.device.memory_bytes / 1e9
    yield f"memory {memory.total_bytes / 1e9:.1f} of {limit_gb:.1f} GB: {parts}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e3:.3g} kB"


def _point_row(point: Point, chosen: SimulatedStep) -> tuple[str, ...]:
    job, scopes = point.job, point.job.scopes
    codecs = [str(codec) for codec in (job.config.weight_codec, job.config.grad_codec) if codec != "none"]
    seconds = f">{point.bound_s:.4g}" if point.step_s is None else f"{point.step_s:.4g}"
    return (
        scopes.short,
        str(scopes.secondary) if scopes.has_secondary else "",
        "+".join(codecs),
        str(job.micro_batch),
        recompute_word(job.recompute),
        f"{'~' if _is_within(point, chosen) else ''}{seconds}",
        f"{point.memory.total_bytes / 1e9:.1f}",
    )


def _is_within(point: Point, chosen: SimulatedStep) -> bool:
    """Whether another point may be as fast as the chosen one, as far as predictions are sure."""
    limit_s = chosen.step_s * (1 + chosen.certainty.interval)
    return point.job != chosen.job and point.step_s is not None and point.step_s <= limit_s


def point_json(point: Point) -> dict[str, Any]:
    """A point as an object of JSON."""
    return _choices_json(point.job) | {
        "memory_bytes": point.memory.total_bytes,
        "bound_s": point.bound_s,
        "bound_by": point.bound_by,
        "step_s": point.step_s,
    }


def step_json(step: SimulatedStep) -> dict[str, Any]:
    """A simulated step as an object of JSON."""
    job = step.job
    where = {
        "model": job.workload.model.name,
        "cluster": job.cluster.name,
        "world_size": job.cluster.world_size,
    }
    price = {
        "step_s": step.step_s,
        "compute_s": step.compute_s,
        "tokens_per_s": step.tokens_per_s,
        "tokens_per_s_per_rank": step.tokens_per_s_per_rank,
        "tflop_per_s_per_rank": step.model_flop_per_s_per_rank / 1e12,
        "mfu": step.mfu,
        "certainty": {"interval": step.certainty.interval, "half": step.certainty.half, "most": step.certainty.most},
        "sustained_efficiency": job.cluster.device.sustained_efficiency,
        "memory_bytes": step.memory.total_bytes,
        "memory_bytes_by_kind": dict(step.memory.by_kind),
        "sent_bytes_by_axis": dict(step.sent_bytes),
    }
    return where | _choices_json(job) | price


def _choices_json(job: Job) -> dict[str, Any]:
    """The choices of a point: scopes, codecs, micro-batch, recomputation."""
    scopes = job.scopes
    return {
        **scopes.degrees,
        "secondary": scopes.secondary if scopes.has_secondary else None,
        "weight_codec": str(job.config.weight_codec),
        "grad_codec": str(job.config.grad_codec),
        "micro_batch": job.micro_batch,
        "micro_steps": job.num_micro_steps,
        "recompute": job.recompute,
    }
