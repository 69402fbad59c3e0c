"""What did a step hand to the transport? Counted apart from the engine."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mics_strategy.sharding.schedule import Plan

Kind = tuple[str, torch.dtype, int, int]  # collective, dtype, bytes of the full tensor, ranks
# A reduction on gloo exchanges slices and adds them itself.
NAMES = {
    "_allgather_base_": "all_gather",
    "alltoall_base_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


class CountC10d(TorchDispatchMode):
    """Counts every c10d operator that is called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[Kind] = Counter()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self.names[name] += 1
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            full = max(tensors, key=torch.Tensor.numel)
            if name == "alltoall_base_" and args[3]:  # pieces of given sizes
                full, name = args[1], "all_to_all"
            ranks = next(dist.ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
            self.kinds[NAMES.get(name, name), full.dtype, full.numel() * full.element_size(), ranks] += 1
        elif namespace == "_c10d_functional" and name != "wait_tensor":
            self.names[f"functional {name}"] += 1
        return func(*args, **(kwargs or {}))


def planned_kinds(plan: Plan) -> Counter[Kind]:
    """The collectives of a plan in the same terms."""
    kinds: Counter[Kind] = Counter()
    for p in plan.collectives:
        is_narrow = p.collective == "all_reduce" and p.dtype in (torch.bfloat16, torch.float16)
        # In less than the dtype of the sum: slices are exchanged, added, and the sums gathered.
        for name in ("reduce_scatter", "all_gather") if is_narrow else (p.collective,):
            kinds[name, p.dtype, p.full_bytes, p.ranks] += 1
    return kinds
