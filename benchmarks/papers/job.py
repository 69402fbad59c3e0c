"""The job of a row: model, batch and system on its test-bed, for the simulator.

Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.papers.row import PublishedRow
from benchmarks.papers.testbed import NotPredictable, Testbed, megatron_flop
from mics_strategy.errors import ConfigError
from mics_strategy.planner.catalog import describe_model, model_names, model_shape
from mics_strategy.planner.model_formulas import TransformerShape, describe
from mics_strategy.planner.simulator import Job, compute_seconds, step_seconds
from mics_strategy.planner.space import scopes_of
from mics_strategy.planner.workload import Workload

if TYPE_CHECKING:
    from benchmarks.papers.systems import System
    from mics_strategy.planner.model import ModelDescription, UnitModel

_PERSISTENT_NUMEL = 100_000  # stage3_param_persistence_threshold of DeepSpeed: smaller parameters are not sharded
_GPT_VOCAB = 50304
_GPT_RATIO = 128  # hidden size over layers of GPT-3
_FP32_PEAK = {  # datasheets, without tensor cores
    **{"v100": 15.7e12, "a100": 19.5e12, "h100-pcie": 51e12, "h100": 67e12, "gh200": 67e12, "h200": 67e12},
    **{"h20-": 44e12, "b200": 75e12, "b300": 75e12, "gb200": 80e12, "gb300": 80e12, "mi3": 163e12, "t4": 8.1e12},
    **{"a10": 31e12, "a6000": 38.7e12, "l4-": 30e12, "l40": 91e12, "rtx3090": 35.6e12, "rtx4090": 82.6e12},
    **{"rtx5090": 104.8e12, "rtx6000": 91e12, "rtx-pro": 125e12, "gb10": 31e12},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """The model of a row.

    Attributes:
        description: Its units, at the row's length.
        flop: FLOP of a sample as papers count them, without and with recomputation.
        named_numel: Parameters by its name.
        assumptions: Assumptions for what the row does not state.
    """

    description: ModelDescription
    flop: tuple[float, float]
    named_numel: float
    assumptions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PublishedJob:
    """A training of a row.

    Attributes:
        job: Training, for the simulator.
        system: System.
        model: Model as published; that of the job may be cut into other units.
        peak_flop_per_s: Peak of the device.
        assumptions: Assumptions for what the row does not state, and about the system.
    """

    job: Job
    system: System
    model: PublishedModel
    peak_flop_per_s: float
    assumptions: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.job.cluster.world_size

    @functools.cached_property
    def step_s(self) -> float:
        """Seconds of a step."""
        return _step_seconds(self.job)

    @property
    def waiting(self) -> float:
        """Share of the step in which the device waits for collectives, or is slowed by them."""
        return max(0.0, 1 - compute_seconds(self.job) / self.step_s)

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second."""
        return self.job.workload.global_batch / self.step_s

    @property
    def tokens_per_s_per_rank(self) -> float:
        """Tokens per second and rank."""
        return self.samples_per_s * self.model.description.tokens_per_sample / self.world_size

    def flop_per_s(self, *, counts_recomputation: bool) -> float:
        """FLOP per second and rank, as papers count them."""
        flop = self.model.flop[counts_recomputation and bool(self.job.recompute)]
        return flop * self.samples_per_s / self.world_size


@functools.lru_cache(maxsize=256)
def _step_seconds(job: Job) -> float:
    """Seconds of a step; several rows are about one training."""
    return step_seconds(job)


def model_of(row: PublishedRow, testbed: Testbed) -> PublishedModel:
    """The model of a row.

    Raises:
        NotPredictable: The row names no model, several, or one of unknown size.
    """
    name, numel = row.words("model"), row.num_parameters
    tokens, dtype_bytes = row.count("seq_len") or testbed.tokens, 4 if _is_fp32(row) else 2
    if not name and numel is None:
        raise NotPredictable("no model stated")
    if re.search(r"\bor\b", name):
        raise NotPredictable(f"`{name}` are several models; the row does not say which")
    if sizes := re.fullmatch(r"(.*?)([\d.]+b)\s*-\s*[\d.]+b", name):
        smallest = PublishedRow({**row.cells, "model": f"{sizes[1]}{sizes[2]}", "params": sizes[2]})
        model = model_of(smallest, testbed)
        note = f"`{name}` are several models: the smallest is taken"
        return dataclasses.replace(model, assumptions=(*model.assumptions, note))
    known = _catalog_name(name, testbed)
    if known is not None and not isinstance(model_shape(known), TransformerShape):
        description = describe_model(known, 1, dtype_bytes)
        flop = description.model_flop_per_sample
        return PublishedModel(
            description=description, flop=(flop, flop * 4 / 3), named_numel=numel or description.numel, assumptions=()
        )
    shape, assumptions = _shape(row, known)
    try:
        description = describe(dataclasses.replace(shape, num_positions=0), tokens, dtype_bytes)
        units = tuple(dataclasses.replace(unit, tail_flop=0.0) for unit in description.units)
        description = dataclasses.replace(description, units=units)  # the papers' engines recompute whole layers
    except ConfigError as error:
        raise NotPredictable(str(error)) from error
    flop_counts = megatron_flop(shape, tokens, recomputes=False), megatron_flop(shape, tokens, recomputes=True)
    return PublishedModel(
        description=description, flop=flop_counts, named_numel=numel or description.numel, assumptions=assumptions
    )


def _shape(row: PublishedRow, known: str | None) -> tuple[TransformerShape, tuple[str, ...]]:
    """Numbers of a transformer, with what is assumed.

    They are those of the catalog, of the row, or of a GPT of the named size.
    """
    name, numel = row.text("model"), row.num_parameters
    shape = None if known is None else model_shape(known)
    if isinstance(shape, TransformerShape):
        if known == "amsp-llama-30b":
            return shape, ("60 layers of 6144: the published FLOP per token are not those of LLaMA-33B",)
        return shape, ()
    num_layers, hidden = row.count("layers"), row.count("hidden")
    if num_layers and hidden and 2 <= num_layers < 10_000 and hidden < 1_000_000:
        return _stated(row, num_layers, hidden), ("structure by the row's layers and hidden size",)
    if numel is not None and 1e8 <= numel < 1e13:
        shape = _gpt_like(numel)
        return shape, (f"structure not published: GPT of {shape.num_layers} layers of {shape.hidden_size}",)
    raise NotPredictable(f"model `{name}` is not in the catalog, and its size is not stated")


def _stated(row: PublishedRow, num_layers: int, hidden: int) -> TransformerShape:
    """A transformer by the columns of layers and hidden size."""
    heads = row.count("heads") or max(1, hidden // 128)
    return TransformerShape(
        name=row.text("model") or "stated",
        family="bert" if "bert" in row.words("model") else "gpt2",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_heads=heads if hidden % heads == 0 else max(1, hidden // 128),
        vocab_size=row.count("vocab") or _GPT_VOCAB,
    )


def _is_fp32(row: PublishedRow) -> bool:
    return "fp32" in row.words("precision") and "mixed" not in row.words("precision")


def _catalog_name(name: str, testbed: Testbed) -> str | None:
    """The catalog's name of a model; None for unknown ones."""
    if ("wide" in name and "bert" in name) or "variant" in name:
        return None
    slug = re.sub(r"[\s_]+", "-", re.sub(r"\(.*?\)", "", name).strip())
    slug = {"wideresnet-3b": "wide_resnet-3b", "gpt-2-20b": "gpt2-20b"}.get(slug, slug)
    if slug == "llama-30b" and testbed.cluster.name.startswith("amsp"):
        return "amsp-llama-30b"
    return slug if slug in model_names() else None


def _gpt_like(numel: float) -> TransformerShape:
    """A GPT of about so many parameters, with GPT-3's ratio of width to depth."""
    hidden = 128 * max(1, round((numel * _GPT_RATIO / 12) ** (1 / 3) / 128))
    num_layers = max(2, round((numel - _GPT_VOCAB * hidden) / (12 * hidden**2)))
    return TransformerShape(
        name=f"gpt-like-{numel / 1e9:g}b",
        family="gpt2",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_heads=max(1, hidden // 128),
        vocab_size=_GPT_VOCAB,
    )


def make_job(
    row: PublishedRow, system: System, testbed: Testbed, world_size: int, model: PublishedModel | None = None
) -> PublishedJob:
    """The training of a row by one of its systems.

    Args:
        row: Row.
        system: System.
        testbed: Test-bed.
        world_size: Ranks of the job.
        model: Model, where it is not that of `model_of`.

    Raises:
        NotPredictable: The ranks do not fill nodes, the scopes do not fit them, or the batch cannot be divided.
    """
    model = model or model_of(row, testbed)
    per_node = testbed.cluster.ranks_per_node
    if world_size % per_node:
        raise NotPredictable(f"{world_size} ranks do not fill nodes of {per_node}")
    cluster = testbed.cluster.with_nodes(world_size // per_node)
    assumptions = [*testbed.assumptions, *model.assumptions, *system.assumptions]
    peak = cluster.device.peak_flop_per_s
    if _is_fp32(row):
        fp32 = next(flops for name, flops in _FP32_PEAK.items() if cluster.device.name.startswith(name))
        cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, peak_flop_per_s=fp32))
        peak = fp32
    tokens = model.description.tokens_per_sample
    micro_batch = micro_batch_of(row, tokens, testbed, assumptions)
    num_micro_steps = _num_micro_steps(row, tokens, micro_batch * world_size)
    if num_micro_steps is None:
        num_micro_steps = testbed.num_micro_steps
        assumptions.append(f"accumulation not stated: {num_micro_steps} micro-steps")
    recompute = _recompute(row, model, assumptions)
    dtype = "float32" if _is_fp32(row) else "bfloat16"
    workload = Workload(
        model=model.description if system.gathers_layers else by_parameter(model.description),
        global_batch=micro_batch * num_micro_steps * world_size,
        micro_batch=micro_batch,
        recompute=recompute,
        param_dtype=dtype,
    )
    try:
        config = system.config(per_node, world_size, dtype)
        scopes = scopes_of(config, cluster)
    except ConfigError as error:
        raise NotPredictable(str(error)) from error
    job = Job(
        workload=workload,
        cluster=cluster,
        config=config,
        scopes=scopes,
        micro_batch=micro_batch,
        recompute=recompute,
    )
    return PublishedJob(
        job=job, system=system, model=model, peak_flop_per_s=peak, assumptions=tuple(dict.fromkeys(assumptions))
    )


def micro_batch_of(row: PublishedRow, tokens: int, testbed: Testbed, assumptions: list[str]) -> int:
    """Samples of one forward on a rank."""
    stated = row.tokens("micro_batch") or _tokens_per_rank(row)
    if stated and stated >= tokens:
        return stated // tokens
    count = row.count("micro_batch")
    if count is not None and stated is None:
        return count
    assumptions.append(f"micro-batch not stated: {testbed.micro_batch}")
    return testbed.micro_batch


def _tokens_per_rank(row: PublishedRow) -> int | None:
    """Tokens of a rank, as in "1K tokens/GPU"."""
    match = re.search(r"(\d+)\s*k?\b.*token", row.words("micro_batch"))
    return int(match[1]) * 1024 if match and "k" in row.words("micro_batch").split("token")[0] else None


def _num_micro_steps(row: PublishedRow, tokens: int, samples_per_forward: int) -> int | None:
    """Micro-steps of a step; None where neither they nor the batch are stated."""
    if (stated := row.count("grad_accum_steps")) is not None:
        return stated
    samples = (row.tokens("global_batch") or 0) // tokens or row.count("global_batch")
    return max(1, round(samples / samples_per_forward)) if samples else None


def _recompute(row: PublishedRow, model: PublishedModel, assumptions: list[str]) -> bool:
    if row.recomputes is not None:
        return row.recomputes
    is_large = model.description.numel >= 10e9
    assumptions.append(f"recomputation not stated: {'yes' if is_large else 'no'}, by the model's size")
    return is_large


@functools.lru_cache(maxsize=16)
def by_parameter(model: ModelDescription) -> ModelDescription:
    """The model with a unit for each parameter, as an engine without layers gathers.

    Parameters of less than `_PERSISTENT_NUMEL` elements stay with the one before them.
    """
    units = [part for unit in model.units for part in _parts(unit)]
    return dataclasses.replace(model, units=tuple(units))


def _parts(unit: UnitModel) -> Iterator[UnitModel]:
    large = [p for p in unit.parameters if p.numel >= _PERSISTENT_NUMEL]
    if not unit.is_layer or len(large) < 2:
        yield unit
        return
    total = sum(parameter.numel for parameter in large)
    for parameter in large:
        share = parameter.numel / total
        yield dataclasses.replace(
            unit,
            name=f"{unit.name}:{parameter.name}",
            kind=f"{unit.kind}:{math.prod(parameter.shape)}",
            parameters=(parameter,),
            forward_flop=unit.forward_flop * share,
            attention_flop=unit.attention_flop * share,
            tail_flop=unit.tail_flop if parameter is large[-1] else 0.0,
            saved_bytes=round(unit.saved_bytes * share),
            input_bytes=round(unit.input_bytes * share),
            attention=dataclasses.replace(
                unit.attention,
                saved_bytes=round(unit.attention.saved_bytes * share),
                inputs_flop=unit.attention.inputs_flop * share,
            ),
        )
