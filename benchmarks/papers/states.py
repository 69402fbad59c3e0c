"""Memory of a published training: model states, activations and buffers.

Published systems keep gradients in the dtype of the parameters and no sums in fp32, unlike this engine, whose memory
`planner.memory` computes.

Pure.

Source:
    States: AMSP (arXiv:2311.00257), formulas A12 and A13; PaRO (arXiv:2310.06003), table 2; ZeRO++ (arXiv:2306.10209),
    figure 4. Scores of attention that is not fused: Korthikanti et al. (arXiv:2205.05198), section 4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mics_strategy.planner.memory import CONTEXT_BYTES, FRAGMENTATION_SHARE, MicroBatch, activation_bytes

if TYPE_CHECKING:
    from benchmarks.papers.job import PublishedJob

_ADAM_BYTES = 12  # master, and two moments, in fp32
_GATHERED_UNITS = 2  # the one in use, and the one ahead


def states_bytes(job: PublishedJob, numel: float, trained: float | None = None) -> float:
    """Bytes of model states of one rank, secondary copy included.

    Args:
        job: Training.
        numel: Parameters.
        trained: Those of them that are trained; None for all.
    """
    trained = numel if trained is None else trained
    scopes = job.job.scopes
    element = job.job.workload.param.itemsize
    adam = _ADAM_BYTES if element == 2 else 8
    copies = 1 / scopes.params + (1 / scopes.secondary if scopes.has_secondary else 0)
    return numel * element * copies + trained * (element / scopes.grads + adam / scopes.optimizer)


def peak_bytes(job: PublishedJob) -> float:
    """Bytes of the allocator's peak on one rank.

    They are states, activations, gathered units and constant buffers.
    """
    model = job.model.description
    batch = MicroBatch(samples=job.job.micro_batch, recomputes=job.job.recompute)
    activations = sum(activation_bytes(model.units, batch).values())
    largest = max(unit.numel for unit in model.units) * job.job.workload.param.itemsize
    gathered = _GATHERED_UNITS * largest if job.job.scopes.params > 1 else 0
    pending = largest
    dynamic = activations + gathered + pending
    trained = sum(p.numel for unit in model.units for p in unit.parameters if p.is_trained)
    return states_bytes(job, model.numel, trained) + (1 + FRAGMENTATION_SHARE) * dynamic + job.system.buffer_bytes


def fits(job: PublishedJob) -> bool:
    """Whether the training fits into a rank's memory."""
    return peak_bytes(job) + CONTEXT_BYTES <= job.job.cluster.device.memory_bytes
