"""Arithmetic of a public run that this package's engine does not do itself: tensor parallelism, FP8, adapters, experts.

The units of the model are those of one rank of data parallelism, divided among its ranks of tensor parallelism; their
seconds are the planner's own, with what is added here.

Pure.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.papers.testbed import COPIED_BYTES, UNFUSED_ADAM_BYTES
from mics_strategy.planner.measured import MeasuredCompute, MeasuredUnit
from mics_strategy.planner.model_formulas import describe
from mics_strategy.planner.simulator import Job, compute_times, matmul_flop_per_s, recompute_seconds

if TYPE_CHECKING:
    from benchmarks.papers.row import PublishedRow
    from benchmarks.planners.models import RunModel
    from mics_strategy.planner.model import ModelDescription, ParameterShape, UnitModel

# 8-bit products beside those in 16 bits, by the datasheets.
_FP8_SPEED = 2.0
_FP8_INPUTS = 4  # elements that are converted by kernels of their own, by those of a layer's width; norms convert theirs
_FUSED_ADAM_BYTES = 30  # of memory traffic for each element, in one kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How a run computes.

    Attributes:
        tensor: Ranks of tensor parallelism.
        is_fp8: Whether matrix products of layers are in 8 bits.
        is_fp32: Whether everything is in fp32.
        is_lora: Whether adapters alone are trained.
        is_compiled: Whether a compiler fuses what is no matrix product.
        is_selective: Whether only some of the activations are recomputed.
        optimizer_bytes: Bytes of memory traffic of the optimizer for each element.
    """

    tensor: int = 1
    is_fp8: bool = False
    is_fp32: bool = False
    is_lora: bool = False
    is_compiled: bool = False
    is_selective: bool = False
    optimizer_bytes: int = _FUSED_ADAM_BYTES

    @classmethod
    def of(cls, row: PublishedRow, tensor: int) -> Arithmetic:
        """The arithmetic of a row."""
        precision, system = row.words("precision"), f"{row.words('system')} {row.words('model')}"
        return cls(
            tensor=tensor,
            is_fp8="fp8" in precision or "mxfp8" in precision,
            is_fp32="fp32" in precision and "mixed" not in precision and "bf16" not in precision,
            is_lora="lora" in system or "peft" in system or row.words("class") == "lora",
            optimizer_bytes=UNFUSED_ADAM_BYTES if "composer" in system else _FUSED_ADAM_BYTES,
            is_compiled=row.words("compile") in ("y", "yes", "true"),
        )


def describe_run(model: RunModel, tokens: int, arithmetic: Arithmetic) -> ModelDescription:
    """The units of a run on one rank of data parallelism."""
    is_fused = arithmetic.is_compiled or model.shape.family != "llama"  # its norms, gates and rotations are many kernels
    shape = dataclasses.replace(model.shape, num_positions=0, is_fused=is_fused)
    described = describe(shape, tokens, 4 if arithmetic.is_fp32 else 2)
    units = tuple(_unit(unit, index, model, tokens, arithmetic) for index, unit in enumerate(described.units))
    return dataclasses.replace(described, units=units)


def _unit(unit: UnitModel, index: int, model: RunModel, tokens: int, arithmetic: Arithmetic) -> UnitModel:
    tensor = arithmetic.tensor
    parameters = tuple(_parameter(p, unit, model, arithmetic) for p in unit.parameters)
    is_expert = unit.is_layer and model.experts > 1
    ffn_flop = 2.0 * tokens * sum(p.numel for p in unit.parameters if ".mlp." in p.name) if is_expert else 0.0
    return dataclasses.replace(
        unit,
        parameters=parameters,
        forward_flop=(unit.forward_flop + ffn_flop * (model.active - 1)) / tensor,
        attention_flop=unit.attention_flop / tensor,
        tail_flop=unit.tail_flop / tensor,
        saved_bytes=round(unit.saved_bytes / tensor),
        input_bytes=round(unit.input_bytes / tensor),
        working_bytes=round(unit.working_bytes / tensor),
        freed_bytes=round(unit.freed_bytes / tensor),
        is_layer=unit.is_layer and not (arithmetic.is_selective and index % 2),
    )


def _parameter(p: ParameterShape, unit: UnitModel, model: RunModel, arithmetic: Arithmetic) -> ParameterShape:
    rows = p.shape[0]
    if len(p.shape) > 1:
        rows = math.ceil(rows / arithmetic.tensor) * (model.experts if ".mlp." in p.name else 1)
    is_trained = not (arithmetic.is_lora and unit.is_layer) and not arithmetic.is_lora
    return dataclasses.replace(p, shape=(rows, *p.shape[1:]), is_trained=is_trained)


def with_arithmetic(job: Job, model: RunModel, tokens: int, arithmetic: Arithmetic) -> Job:
    """The job with the seconds of its units."""
    device = job.cluster.device
    units = []
    for unit in job.workload.model.units:
        forward_s, backward_s = compute_times(unit, job.micro_batch, device)
        recompute_s = recompute_seconds(unit, job.micro_batch, device)
        if unit.kind.startswith("layer"):
            comm_s = _tensor_seconds(job, model, tokens, arithmetic) / max(1, _parts(job))
            saved_s = _saved_seconds(job, unit, arithmetic)
            forward_s, recompute_s = forward_s + comm_s - saved_s, recompute_s + comm_s - saved_s
            backward_s += comm_s - 2 * saved_s
        if arithmetic.is_lora:
            backward_s -= forward_matmul_seconds(job, unit)
        copies_s = _copied_bytes(job, unit) / device.sustained_bytes_per_s
        measured = MeasuredUnit(
            name=unit.name,
            forward_s=forward_s,
            backward_s=max(0.0, backward_s) + copies_s,
            recompute_s=max(0.0, recompute_s),
        )
        units.append(measured)
    measured_compute = MeasuredCompute(
        micro_batch=job.micro_batch,
        units=tuple(units),
        optimizer_s_per_numel=arithmetic.optimizer_bytes / device.sustained_bytes_per_s,
    )
    return dataclasses.replace(job, workload=dataclasses.replace(job.workload, measured=measured_compute))


def forward_matmul_seconds(job: Job, unit: UnitModel) -> float:
    """Seconds of the matrix products of a unit's forward, attention left out."""
    flop = (unit.forward_flop - unit.attention_flop) * job.micro_batch
    return flop / matmul_flop_per_s(unit, job.cluster.device)


def _saved_seconds(job: Job, unit: UnitModel, arithmetic: Arithmetic) -> float:
    """Seconds that 8-bit products save in a forward, less those of the conversions."""
    if not arithmetic.is_fp8:
        return 0.0
    matmul_s = forward_matmul_seconds(job, unit)
    # Inputs and weights are read in 16 bits and written in 8, once as they are and once transposed.
    numel = unit.input_bytes / 2 * job.micro_batch * _FP8_INPUTS + unit.numel
    return matmul_s * (1 - 1 / _FP8_SPEED) - 4 * numel / job.cluster.device.sustained_bytes_per_s


def _copied_bytes(job: Job, unit: UnitModel) -> float:
    """Bytes that sharding moves in memory beside the collectives: gradients into a flat buffer in the wire's dtype."""
    if job.scopes.grads == 1:
        return 0.0
    copied = COPIED_BYTES[job.config.reduce_dtype.itemsize]
    return float(sum(p.numel for p in unit.parameters if p.is_trained) * copied)


def _parts(job: Job) -> int:
    """Units of a layer: several where an engine gathers each parameter alone."""
    layers = [unit for unit in job.workload.model.units if unit.kind.startswith("layer")]
    names = {unit.name.split(":")[0] for unit in layers}
    return round(len(layers) / len(names)) if names else 1


def _tensor_seconds(job: Job, model: RunModel, tokens: int, arithmetic: Arithmetic) -> float:
    """Seconds of a layer's collectives of tensor parallelism in a forward: two all-reduces of its activations.

    Source:
        Megatron-LM (arXiv:1909.08053), section 3; with sequence parallelism the bytes are the same (arXiv:2205.05198).
    """
    ranks = arithmetic.tensor
    if ranks == 1:
        return 0.0
    num_bytes = 2.0 * job.micro_batch * tokens * model.shape.hidden_size
    sent = 2 * 2 * (ranks - 1) / ranks * num_bytes
    link = job.cluster.intra_node
    return sent / link.bytes_per_s + 4 * (ranks - 1) * link.latency_s
