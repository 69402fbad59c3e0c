"""Arithmetic of a public run that this package's engine does not do itself: tensor parallelism, FP8, adapters.

The units of the model are those of one rank of data parallelism, divided among its ranks of tensor parallelism; their
seconds are the planner's own, with what is added here.

Pure.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.papers.testbed import COPIED_BYTES, UNFUSED_ADAM_BYTES
from mics_strategy.planner.measured import MeasuredCompute, MeasuredUnit
from mics_strategy.planner.model_formulas import describe
from mics_strategy.planner.recompute import ATTENTION
from mics_strategy.planner.simulator import Job, compute_times, matmul_flop_per_s, recompute_seconds, straggler_factor

if TYPE_CHECKING:
    from benchmarks.papers.row import PublishedRow
    from benchmarks.planners.models import RunModel
    from mics_strategy.planner.model import ModelDescription, ParameterShape, UnitModel

# 8-bit products beside those in 16 bits: by the datasheets; with scales by row torchao's README has two fifths of the
# gain.
_FP8_SPEED, _ROWWISE_SPEED = 2.0, 1.25
_FP8_INPUTS = 4  # elements that kernels of their own convert, by those of a layer's width; norms convert theirs
# Words of systems whose kernels are fused by hand, or with norms and rotations of their own; others are eager.
_KERNELS = (
    (r"megatron|nemo|automodel|fast-llm|unsloth|liger|nanotron|transformer ?engine|composer", "fused"),
    (r"internevo|colossal|open_lm|xformers", "partly"),
)
_REENTRANT = r"internevo|megatron|nemo|deepspeed|colossal|trainer|zero"  # whose checkpoints repeat whole layers
# Bytes that LLaMA's eager layer moves beyond the saved activations' passes for each element of its width, in a forward:
# two RMSNorms in fp32 (36 each), two rotations (18), silu and product (10 of 2.7 h) and two additions (6) are 147,
# which take 1.65 times as long as the passes that were fitted on MPT's 36; of these, 91 are counted already.
_EAGER_BYTES = 1.65 * 147 - 91
# Share of LLaMA's saved activations that tensor parallelism without sequence parallelism keeps whole: inputs and
# outputs of the norms, and of the blocks (20 of 46 h bytes; Korthikanti et al., arXiv:2205.05198, table 2).
_REPLICATED = 0.45
# Bytes that adapters of all products move likewise, in a forward: inputs are read once (2 bytes of 9.5 h), and outputs
# are read and written where the adapter is added (4 of 10.5 h).
_ADAPTER_BYTES = 1.65 * 61
_SLICE_BYTES, _RANKS_OF_ADAPTER = 2**19, 2  # of a chain in NCCL; ranks that share an adapter
_ADDED_BYTES = 6  # of a gradient that autograd adds to that of the micro-step before, in 16 bits
_FUSED_ADAM_BYTES = 30  # of memory traffic for each element, in one kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How a run computes.

    Attributes:
        tensor: Ranks of tensor parallelism.
        is_fp8: Whether matrix products of layers are in 8 bits.
        is_rowwise: Whether each row of an 8-bit matrix has a scale of its own.
        is_fp32: Whether everything is in fp32.
        is_lora: Whether adapters alone are trained.
        kernels: Kernels that are no matrix products: "fused" by a compiler or by hand, "partly" with kernels for norms
            and rotations, or "eager".
        stops_early: Whether recomputation ends at the last activation that is kept.
        optimizer_bytes: Bytes of memory traffic of the optimizer for each element.
        replicated: Share of activations that tensor parallelism does not divide.
    """

    tensor: int = 1
    is_fp8: bool = False
    is_rowwise: bool = False
    is_fp32: bool = False
    is_lora: bool = False
    kernels: str = "eager"
    stops_early: bool = True
    optimizer_bytes: int = _FUSED_ADAM_BYTES
    replicated: float = 0.0

    @classmethod
    def of(cls, row: PublishedRow, tensor: int) -> Arithmetic:
        """The arithmetic of a row."""
        precision, system = row.words("precision"), f"{row.words('system')} {row.words('model')}"
        is_compiled = row.words("compile") in ("y", "yes", "true")
        kernels = next((name for pattern, name in _KERNELS if re.search(pattern, row.words("system"))), "eager")
        return cls(
            tensor=tensor,
            is_fp8="fp8" in precision or "mxfp8" in precision,
            is_rowwise="row" in precision,
            is_fp32="fp32" in precision and "mixed" not in precision and "bf16" not in precision,
            is_lora="lora" in system or "peft" in system or row.words("class") == "lora",
            optimizer_bytes=UNFUSED_ADAM_BYTES if "composer" in system else _FUSED_ADAM_BYTES,
            kernels="fused" if is_compiled else kernels,
            replicated=_REPLICATED if tensor > 1 and re.search(r"internevo|deepspeed", system) else 0.0,
            stops_early=re.search(_REENTRANT, system) is None,
        )


def describe_run(model: RunModel, tokens: int, arithmetic: Arithmetic) -> ModelDescription:
    """The units of a run on one rank of data parallelism."""
    is_fused = arithmetic.kernels == "fused" or model.shape.family != "llama"
    shape = dataclasses.replace(model.shape, num_positions=0, is_fused=is_fused)
    described = describe(shape, tokens, 4 if arithmetic.is_fp32 else 2)
    units = tuple(_unit(unit, arithmetic) for unit in described.units)
    return dataclasses.replace(described, units=units)


def _unit(unit: UnitModel, arithmetic: Arithmetic) -> UnitModel:
    tensor = arithmetic.tensor
    divided = arithmetic.replicated + (1 - arithmetic.replicated) / tensor
    parameters = tuple(_parameter(p, arithmetic) for p in unit.parameters)
    return dataclasses.replace(
        unit,
        parameters=parameters,
        forward_flop=unit.forward_flop / tensor,
        attention_flop=unit.attention_flop / tensor,
        width=round(2 * unit.width / (1 + tensor)),  # the rows of half of the products are divided
        tail_flop=unit.tail_flop / tensor if arithmetic.stops_early else 0.0,
        saved_bytes=round(unit.saved_bytes * divided),
        input_bytes=round(unit.input_bytes / (1 if arithmetic.replicated else tensor)),
        working_bytes=round(unit.working_bytes / tensor),
        freed_bytes=round(unit.freed_bytes / tensor),
        attention=dataclasses.replace(
            unit.attention,
            saved_bytes=round(unit.attention.saved_bytes / tensor),
            inputs_flop=unit.attention.inputs_flop / tensor,
        ),
    )


def _parameter(p: ParameterShape, arithmetic: Arithmetic) -> ParameterShape:
    rows = p.shape[0]
    if len(p.shape) > 1:
        rows = math.ceil(rows / arithmetic.tensor)
    return dataclasses.replace(p, shape=(rows, *p.shape[1:]), is_trained=not arithmetic.is_lora)


def with_arithmetic(job: Job, model: RunModel, tokens: int, arithmetic: Arithmetic) -> Job:
    """The job with the seconds of its units."""
    device = job.cluster.device
    units = []
    for unit in job.workload.model.units:
        forward_s, backward_s = compute_times(unit, job.micro_batch, device)
        recompute_s = recompute_seconds(unit, job.micro_batch, device)
        if unit.kind.startswith("layer"):
            tensor_s = comm_s = _tensor_seconds(job, model, tokens, arithmetic) / max(1, _parts(job))
            saved_s = _saved_seconds(job, unit, arithmetic)
            comm_s += _eager_seconds(job, model, arithmetic, unit)
            forward_s, recompute_s = forward_s + comm_s - saved_s, recompute_s + comm_s - saved_s
            backward_s += 2 * comm_s - 2 * saved_s - tensor_s
        if job.recompute == ATTENTION:  # without collectives, and in 16 bits
            recompute_s = recompute_seconds(unit, job.micro_batch, device, ATTENTION)
        copies_s = _copied_bytes(job, unit) / device.sustained_bytes_per_s
        slowest = straggler_factor(job.cluster.num_nodes)
        measured = MeasuredUnit(
            name=unit.name,
            forward_s=forward_s * slowest,
            backward_s=(max(0.0, backward_s) + copies_s) * slowest,
            recompute_s=max(0.0, recompute_s) * slowest,
        )
        units.append(measured)
    measured_compute = MeasuredCompute(
        micro_batch=job.micro_batch,
        units=tuple(units),
        optimizer_s_per_numel=arithmetic.optimizer_bytes / device.sustained_bytes_per_s,
    )
    return dataclasses.replace(job, workload=dataclasses.replace(job.workload, measured=measured_compute))


def with_timed_recompute(job: Job) -> Job:
    """The job for its seconds: those of a second forward are its attention's alone where that is recomputed."""
    return dataclasses.replace(job, recompute=True) if job.recompute == ATTENTION else job


def forward_matmul_seconds(job: Job, unit: UnitModel) -> float:
    """Seconds of the matrix products of a unit's forward, attention left out."""
    flop = (unit.forward_flop - unit.attention_flop) * job.micro_batch
    return flop / matmul_flop_per_s(unit, job.cluster.device)


def _saved_seconds(job: Job, unit: UnitModel, arithmetic: Arithmetic) -> float:
    """Seconds that 8-bit products save in a forward, less those of the conversions."""
    if not arithmetic.is_fp8:
        return 0.0
    matmul_s = forward_matmul_seconds(job, unit)
    speed = _ROWWISE_SPEED if arithmetic.is_rowwise else _FP8_SPEED
    # Inputs and weights are read in 16 bits and written in 8, once as they are and once transposed.
    numel = unit.input_bytes / 2 * job.micro_batch * _FP8_INPUTS + unit.numel
    return matmul_s * (1 - 1 / speed) - 4 * numel / job.cluster.device.sustained_bytes_per_s


def _eager_seconds(job: Job, model: RunModel, arithmetic: Arithmetic, unit: UnitModel) -> float:
    """Seconds of a layer's forward in kernels that no product's memory covers; a backward takes twice as long."""
    num_bytes = _ADAPTER_BYTES if arithmetic.is_lora else 0.0
    if arithmetic.kernels == "eager" and model.shape.family == "llama":
        num_bytes += _EAGER_BYTES
    return num_bytes * unit.input_bytes / 2 * job.micro_batch / job.cluster.device.sustained_bytes_per_s


def _copied_bytes(job: Job, unit: UnitModel) -> float:
    """Bytes that gradients move in memory beside the collectives: into a flat buffer, or onto those of before."""
    wire = 4 if job.config.reduce_dtype == torch.float32 else 2
    copied = COPIED_BYTES[wire] if job.scopes.grads > 1 else _ADDED_BYTES if job.num_micro_steps > 1 else 0
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


def owners_broadcasts_s(job: Job, system: str) -> float:
    """Seconds of InternEvo's broadcasts beyond the bytes: every owner of stepped parameters sends them to all ranks.

    A parameter belongs to one rank, so that there are at most as many broadcasts as parameters. Each is a chain through
    all ranks, which a slice of NCCL's buffer passes.

    Source:
        InternEvo, hybrid_zero_optim.py; NCCL, src/graph/tuning.cc and NCCL_BUFFSIZE of 4 MiB in 8 slices.
    """
    owners = job.scopes.optimizer
    if system != "internevo" or owners <= job.cluster.ranks_per_node:
        return 0.0
    count = min(owners, sum(len(unit.parameters) for unit in job.workload.model.units))
    num_nodes = math.ceil(owners / job.cluster.ranks_per_node)
    adapter_bytes_per_s = job.cluster.inter_node.bytes_per_s * _RANKS_OF_ADAPTER
    hop_s = job.cluster.inter_node.latency_s + _SLICE_BYTES / adapter_bytes_per_s
    return count * ((num_nodes - 1) * hop_s + (owners - num_nodes) * job.cluster.intra_node.latency_s)
