"""What do the engine's buffers take, beside those of FSDP2? From the sizes of LLaMA.

``python -m tests.engine.fsdp2_memory`` prints the table of ``docs/design/memory.md``.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from mics_strategy import ShardConfig
from mics_strategy.estimate import MemoryEstimate, estimate_memory
from tests.rank_process import forget_meshes

NODES, RANKS_PER_NODE = 2, 8
LAYERS = 4  # of FSDP2's models: its buffers do not grow with the number of layers
_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
SIZES: dict[str, dict[str, int]] = {  # arXiv:2302.13971 table 2, arXiv:2307.09288 table 1, arXiv:2407.21783 table 3
    "LLaMA 7B": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "LLaMA 13B": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "LLaMA 2 70B": _70B,
    "LLaMA 3 70B": {**_70B, "vocab_size": 128256},
}
SHARDS = ("master shards", "parameter shards", "gradients")
CORNER, ALL_BUFFERS = "GB per rank", "**all buffers**"  # of the table


def model_of(name: str, num_layers: int | None = None) -> Any:
    """The model on the current device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SIZES[name] if num_layers is None else {**SIZES[name], "num_hidden_layers": num_layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="eager"))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of living storages after every operator.

    Args:
        shards: Tensors that do not count.

    Attributes:
        peak_bytes: The most that lived at once, without shards: the given ones, and results of reduce-scatters.
    """

    def __init__(self, shards: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: Any = WeakIdKeyDictionary()
        self._shards: Any = WeakIdKeyDictionary()
        for shard in shards:
            self._shards[shard.untyped_storage()] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d._reduce_scatter_base_.default:
            self._shards[args[0].untyped_storage()] = None
            self._live.pop(args[0].untyped_storage(), None)
        for leaf in tree_leaves((args, result)):
            if isinstance(leaf, FakeTensor) and leaf.untyped_storage() not in self._shards:
                self._live[leaf.untyped_storage()] = None
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in self._live))
        return result


@contextmanager
def _fake_world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=NODES * RANKS_PER_NODE)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


@functools.cache
def of_fsdp2(name: str, num_layers: int | None, *, wraps_ends: bool = False) -> int:
    """FSDP2's bytes per rank at the peak of one forward and backward over two tokens, without shards.

    `fully_shard` of every decoder layer and the root, on the mesh of replicas by shards.

    Args:
        name: Name of the model.
        num_layers: Number of its layers; None for all.
        wraps_ends: Whether it is called for the embedding and the head as well.
    """
    with _fake_world():
        mesh = init_device_mesh("cpu", (NODES, RANKS_PER_NODE), mesh_dim_names=("replicate", "shard"))
        with FakeTensorMode():
            model = model_of(name, num_layers)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            ends = [model.model.embed_tokens, model.lm_head] if wraps_ends else []
            for module in (*model.model.layers, *ends, model):
                fully_shard(module, mesh=mesh, mp_policy=policy)
            live = LiveBytes(parameter.to_local() for parameter in model.parameters())
            with live:
                tokens, mask = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 1, 2, 2)
                model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.sum().backward()
    return live.peak_bytes


def of_mics(name: str, num_layers: int | None = None) -> MemoryEstimate:
    """Our estimate of the same job."""
    with torch.device("meta"):
        model: nn.Module = model_of(name, num_layers)
    config = ShardConfig.preset("mics", param_dtype="bfloat16", reduce_dtype="float32")
    return estimate_memory(model, config, num_nodes=NODES, ranks_per_node=RANKS_PER_NODE)


def buffers_of(estimate: MemoryEstimate) -> dict[str, int]:
    """Bytes by purpose, without shards but with gradients that autograd holds."""
    buffers = {purpose: size for purpose, size in estimate.bytes_by_purpose.items() if purpose not in SHARDS}
    return {**buffers, "gradients of autograd": estimate.pending_grad_bytes}


def own_rows(name: str) -> dict[str, float]:
    """Bytes per rank of ours, by row of the table."""
    estimate = of_mics(name)
    buffers = {purpose: size for purpose, size in buffers_of(estimate).items() if size > 10**7}
    shards = sum(estimate.bytes_by_purpose.get(purpose, 0) for purpose in SHARDS)
    all_buffers = sum(buffers.values())
    return {**buffers, ALL_BUFFERS: all_buffers, "shards": shards, "buffers and shards": all_buffers + shards}


def fsdp2_shards(name: str) -> float:
    """Bytes per rank of FSDP2's parameters and gradients, in fp32."""
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in model_of(name).parameters())
    return 2 * 4 * numel / RANKS_PER_NODE


def column_of(name: str) -> dict[str, float]:
    """Bytes per rank of a model, by row of the table, in its order."""
    own, peak, wrapped = own_rows(name), of_fsdp2(name, LAYERS), of_fsdp2(name, LAYERS, wraps_ends=True)
    shards, both = own.pop("shards"), own.pop("buffers and shards")
    return {
        **own,
        "**FSDP2's at its peak**": peak,
        "FSDP2's, embedding and head wrapped": wrapped,
        "shards": shards,
        "FSDP2's shards": fsdp2_shards(name),
        "buffers and shards": both,
        "FSDP2's, embedding and head wrapped, and shards": wrapped + fsdp2_shards(name),
    }


def cell(size: float) -> str:
    """Bytes as the table has them, in GB."""
    return f"{size / 1e9:.2f}"


def main() -> None:
    """Print the table, a column for each model."""
    columns = [column_of(name) for name in SIZES]
    print(f"| {CORNER} | {' | '.join(SIZES)} |")
    print("|---" * (len(SIZES) + 1) + "|")
    for row in columns[0]:
        print(f"| {row} | {' | '.join(cell(column[row]) for column in columns)} |")


if __name__ == "__main__":
    main()
