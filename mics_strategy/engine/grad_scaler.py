"""The operation of a `GradScaler` on sharded gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from mics_strategy.engine.tensor_memory import count_writes

JOB_MESH = "mics_job_mesh"  # attribute of an island's mesh: that of all ranks, which must skip the same steps
LOSS_SCALES = "mics_loss_scales"  # attribute of a mesh: the scales of delayed gradients (`delayed_hops.LossScales`)


def unscale(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Unscale gradients for a `GradScaler`, with overflows of all ranks, also of other islands. Collective.

    DTensor's own implementation shares them along the placements of the first gradient only, and not at all if that is
    a scalar's.
    """
    mesh = next(grad.device_mesh for grad in grads if isinstance(grad, DTensor))
    if (scales := getattr(mesh, LOSS_SCALES, None)) is not None:
        inv_scale = scales.unscale(inv_scale)
    run = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    run([grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads], found_inf, inv_scale)
    count_writes(grads)
    mesh = getattr(mesh, JOB_MESH, mesh)
    names = mesh.mesh_dim_names or ()
    placements = [Partial("max") if name == "shard" else Replicate() for name in names]
    found_inf.copy_(DTensor.from_local(found_inf, mesh, placements, run_check=False).full_tensor())
