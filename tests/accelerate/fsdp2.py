"""How does Accelerate's own FSDP2 train on CPUs, which it refuses?

By a state that says so. It is the oracle for what scripts see and for what lies in checkpoints.
"""

from typing import Any

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin


def fsdp2(replicas: int = 1, **options: Any) -> Accelerator:
    """An Accelerator that shards by torch's FSDP2, over `replicas` groups of the ranks (HSDP)."""
    own = {name.removeprefix("accelerator_"): options.pop(name) for name in [*options] if name.startswith("accel")}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"], **options
    )
    parallelism = None
    state = AcceleratorState(cpu=True, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True)
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = plugin
    if replicas > 1:
        size = PartialState().num_processes // replicas
        parallelism = state.parallelism_config = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=size)
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=parallelism, **own)
