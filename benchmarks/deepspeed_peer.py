"""How is DeepSpeed's MiCS run on CPUs?

Release 0.19.2 is the last one whose MiCS runs. It needs an environment of its own, and here one replacement: gloo has
no coalesced all-gather, so the gathers of a call are issued one by one, with the same bytes in the same order.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend

from benchmarks.workload import Batch, Workload


class _AllOf:
    """Waits for several collectives."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _gather_one_by_one(
    _: TorchBackend, outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None, async_op: bool = False
) -> _AllOf | None:
    pairs = zip(outputs, inputs, strict=True)
    works = _AllOf([dist.all_gather_into_tensor(out, own, group=group, async_op=True) for out, own in pairs])
    if async_op:
        return works
    works.wait()
    return None


class DeepSpeedMics:
    """MiCS with one partition group for each node."""

    def __init__(self, workload: Workload, *, world_size: int, ranks_per_node: int) -> None:
        self.facts: dict[str, float] = {}
        TorchBackend.all_gather_coalesced = _gather_one_by_one
        deepspeed.init_distributed(dist_backend="gloo")
        config = _config(workload, world_size, ranks_per_node)
        with deepspeed.zero.MiCS_Init(config_dict_or_path=config):
            model = workload.model()
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(self, batches: list[Batch]) -> float:
        """Train on one batch in each micro-step; the mean loss of this rank."""
        losses = []
        for batch in batches:
            loss = self._engine(batch.inputs, batch.targets)
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())


def _config(workload: Workload, world_size: int, ranks_per_node: int) -> dict[str, Any]:
    zero = {
        "stage": 3,
        "mics_shard_size": ranks_per_node,
        "mics_hierarchical_params_gather": False,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 5_000_000,
        "stage3_param_persistence_threshold": 0,  # all parameters are sharded, and released after use: a model this
        "stage3_max_live_parameters": 0,  # small would else stay gathered
        "stage3_max_reuse_distance": 0,
    }
    optimizer = {"lr": workload.learning_rate, "weight_decay": 0.01, "torch_adam": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": workload.accumulation,
        "train_batch_size": workload.micro_batch * workload.accumulation * world_size,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
    }
    if workload.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    return config
