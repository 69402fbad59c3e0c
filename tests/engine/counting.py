"""Traffic that a step hands to the transport, counted outside of the engine.

Messages and all-reduces are counted where torch takes them, in any thread, messages with their real sizes. Other
collectives of torch are counted by the bytes that one rank must send in them. Reads of peer memory are counted at the
reader: a rank reads as much as the others read of it.
"""

from collections import Counter
from types import TracebackType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mics_strategy.comm import peer_memory
from mics_strategy.comm.transport import GlooTransport
from mics_strategy.engine.plan import Plan

Kind = tuple[torch.dtype, int]  # dtype, ranks of the group


class CountC10d(TorchDispatchMode):
    """Counts calls of torch.distributed and reads of peer memory in its context.

    Counts are bytes of this rank, and operators by name.

    Attributes:
        kinds: Bytes by dtype and ranks of the group.
        carried: The same of gradients: the groups that carry nothing else.
        names: Operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[Kind] = Counter()
        self.carried: Counter[Kind] = Counter()
        self.names: Counter[str] = Counter()
        send = dist.ProcessGroup.send

        def counted(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
            num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
            self.names["send"] += bool(num_bytes)  # a message of no bytes is a greeting
            self._add(group, tensors[0].dtype, num_bytes)
            return send(group, tensors, *args)

        all_reduce = dist.ProcessGroup.allreduce

        def counted_all_reduce(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
            self.names["allreduce_"] += 1
            num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
            self._add(group, tensors[0].dtype, 2 * num_bytes * (group.size() - 1) // group.size())
            return all_reduce(group, tensors, *args)

        receive, read_into = GlooTransport.recv, peer_memory.read_into
        groups: dict[int, Any] = {}  # by the address of what they are to receive

        def noted(transport: GlooTransport, tensor: torch.Tensor, *args: Any) -> Any:
            groups[tensor.data_ptr()] = transport.group
            return receive(transport, tensor, *args)

        def counted_read(out: torch.Tensor, *args: Any) -> None:
            read_into(out, *args)
            if out.data_ptr() in groups:  # else asked for before
                self.names["read"] += 1
                self._add(groups.pop(out.data_ptr()), out.dtype, out.numel() * out.itemsize)

        self._patches = [
            mock.patch.object(GlooTransport, "recv", noted),
            mock.patch.object(peer_memory, "read_into", counted_read),
            mock.patch.object(dist.ProcessGroup, "send", counted),
            mock.patch.object(dist.ProcessGroup, "allreduce", counted_all_reduce),
        ]

    def _add(self, group: Any, dtype: torch.dtype, num_bytes: int) -> None:
        if num_bytes:
            self.kinds[dtype, group.size()] += num_bytes
            if group.group_desc.startswith(("mics.grad_reduce_scatter.", "mics.second_", "mics.control.")):
                self.carried[dtype, group.size()] += num_bytes

    def __enter__(self) -> "CountC10d":
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, where)
        for patch in self._patches:
            patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name not in ("send", "recv_", "allreduce_"):
            self.names[name] += 1
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            full = max(tensors, key=torch.Tensor.numel)
            if name == "broadcast_" and full.dtype is torch.uint8:  # of buffers, which no plan has
                return func(*args, **(kwargs or {}))
            self._add(group, full.dtype, _sent_bytes(name, args, full, group))
        elif namespace == "_c10d_functional" and name != "wait_tensor":
            self.names[f"functional {name}"] += 1
        return func(*args, **(kwargs or {}))


def _sent_bytes(name: str, args: tuple, full: torch.Tensor, group: dist.ProcessGroup) -> int:
    num_bytes, ranks = full.numel() * full.itemsize, group.size()
    if name == "alltoall_base_" and args[3]:  # pieces of given sizes: the second tensor goes out
        outgoing, sizes = args[1], args[4]
        return (outgoing.numel() - sizes[group.rank()]) * outgoing.itemsize
    if name == "alltoall_":
        return sum(tensor.numel() * tensor.itemsize for tensor in args[1]) // ranks * (ranks - 1)
    if name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
        return num_bytes // ranks * (ranks - 1)
    return num_bytes  # of no plan, so it shows as a difference


def planned_kinds(plan: Plan) -> Counter[Kind]:
    """The bytes of a plan in the same terms."""
    kinds: Counter[Kind] = Counter()
    for p in plan.collectives:
        kinds[p.dtype, p.size] += p.sent_bytes
    return kinds
