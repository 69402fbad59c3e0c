"""Placement of master shards over the ranks, and assembly of full tensors.

On gloo, torch's `full_tensor` does not do: its functional all-gather ends in the backend's coalesced one, which
sometimes corrupts the heap of the process while other Python threads run (torch 2.11 to 2.13;
``docs/design/full-tensor.md`` has a program that shows it). Communication threads are such threads, and saving a model
makes one call for each of its tensors. The plain all-gather has no such fault.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from mics_strategy.comm.communicator import AnyCommunicator
from mics_strategy.comm.watched_work import call_watch

_PRIME = 1_000_003
_NUM_SEEDS = 1 << 62


class ReplicaRandom:
    """Seeds for random numbers drawn into shards.

    They are equal on all replicas of a shard, and different on every shard.

    Code that draws into shards (an optimizer with noise or stochastic rounding, `nn.init` on sharded parameters, noise
    on gradients) would otherwise give replicas different values, since each rank has its own generator.

    Args:
        seed: Seed, the same on all ranks.
        index: Index of the shard; the same on its replicas.
        device: Device of the shards.
    """

    def __init__(self, seed: int, index: int, device: torch.device) -> None:
        self._seed = seed
        self._index = index
        self._devices = [device] if device.type == "cuda" else []
        self._num_draws = 0

    @property
    def position(self) -> tuple[int, int]:
        """Seed, and number of draws so far, which are equal on all ranks."""
        return self._seed, self._num_draws

    def move_to(self, position: tuple[int, int]) -> None:
        """Draw next what other ranks at this position do."""
        self._seed, self._num_draws = position

    def for_shard(self, index: int) -> ReplicaRandom:
        """Seeds of the same job for another shard."""
        devices = self._devices or [torch.device("cpu")]
        return ReplicaRandom(self._seed, index, devices[0])

    @contextmanager
    def drawing(self, number: int, *, is_whole: bool = False) -> Iterator[None]:
        """Seed the generators inside, and restore their states afterwards.

        Args:
            number: Number that ranks have agreed on.
            is_whole: Whether every rank draws a whole tensor, so that all seeds are equal.
        """
        states = self.begin(number, is_whole=is_whole)
        try:
            yield
        finally:
            self.end(states)

    def begin(self, number: int | None = None, *, is_whole: bool = False) -> list[torch.Tensor]:
        """Seed the generators. Returns their previous states.

        Ranks call it equally often without a number: it counts these calls.
        """
        if number is None:
            self._num_draws += 1
            number = self._seed + _PRIME * self._num_draws
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]
        index = -1 if is_whole else self._index
        seed = (number * _PRIME + index) % _NUM_SEEDS
        torch.default_generator.manual_seed(seed)
        for device in self._devices:
            torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ].manual_seed(seed)
        return states

    def end(self, states: list[torch.Tensor]) -> None:
        """Restore the generators to `states`."""
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlacement:
    """Sharding of the masters of trainable, or of frozen, parameters over the ranks.

    Attributes:
        degree: Ranks over which the masters are sharded.
        index: Index of the shard on this rank.
        model: Number of models that the job has sharded before.
        device_mesh: Mesh of their DTensors: replicas by shards, without axes of one rank.
        sync_comm: Communicator that gathers stepped parameters over the ranks that the optimizer scope has beyond the
            parameter scope; None where the two are equal.
        random: Seeds for random numbers drawn into the masters.
        specs: Specs of their DTensors by shape, sharded dimension and dtype. torch verifies each that is made.
    """

    degree: int
    index: int
    model: int
    device_mesh: DeviceMesh
    sync_comm: AnyCommunicator | None
    random: ReplicaRandom
    specs: dict[tuple[torch.Size, int | None, torch.dtype], DTensorSpec] = field(default_factory=dict, compare=False)


def digest(values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's words, an int64 scalar on its device. It changes when a few elements change."""
    return words_of(values).sum(dtype=torch.int64)


def words_of(values: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as whole numbers, [numel] or more of up to 32 bits; a copy if it is not contiguous."""
    flat = values.detach().reshape(-1).contiguous()
    flat = flat.as_strided(flat.shape, (1,))  # a single element may have any stride
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))


def digest_weight(index: int, count: int) -> int:
    """The factor of rank `index` so that equal numbers of `count` ranks add to 0."""
    return count - 1 if index == 0 else -1


def is_replicated(tensor: DTensor) -> bool:
    """Whether every rank holds the whole tensor."""
    return all(placement.is_replicate() for placement in tensor.placements)


def is_partial(tensor: DTensor) -> bool:
    """Whether the values are sums of what ranks hold, or other reductions."""
    return any(placement.is_partial() for placement in tensor.placements)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks hold different parts of a tensor."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def like_tensor(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor of the shape and placements of `like`, with local part `local`."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def full_tensor(tensor: DTensor, origin: str = "") -> torch.Tensor:
    """The full tensor on every rank, bitwise equal to torch's `full_tensor`.

    Without a gradient.

    Args:
        tensor: Tensor on any device. On the CPU: if it is sharded, then along one dimension of its mesh.
        origin: Origin of the tensor; see `engine.origins`.

    Returns:
        A tensor of its global shape and dtype. If nothing is sharded, it may be the local part itself.

    Cost: one all-gather of the tensor over its shards. Collective over all ranks of its mesh.
    """
    tensor = cast("DTensor", tensor.detach())
    if not tensor.numel():
        return tensor.to_local().new_empty(tensor.shape)  # gloo divides by the size
    if is_replicated(tensor):
        return DTensor.to_local(tensor)
    with _recorded(tensor.device_mesh, f"gather of {_described(tensor, origin)}", _split_dims(tensor)):
        return _gather(tensor)


def sum_parts(tensor: DTensor, origin: str) -> DTensor:
    """The tensor of which ranks have parts, summed, or reduced as the parts ask for. Collective."""
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    with _recorded(tensor.device_mesh, f"reduction of {_described(tensor, origin)}", _split_dims(tensor)):
        return DTensor.redistribute(tensor, placements=placements)


def _split_dims(tensor: DTensor) -> list[int]:
    """Dimensions of the mesh whose ranks have different parts of a tensor."""
    return [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]


def _described(tensor: torch.Tensor, origin: str) -> str:
    return f"{origin or 'a sharded tensor'} of shape {tuple(tensor.shape)}"


def _recorded(mesh: DeviceMesh, label: str, dims: Sequence[int] = ()) -> AbstractContextManager[None]:
    """Record a collective over a dimension of a mesh, or over all, and watch it if it blocks the host."""
    if mesh.size() == 1:
        return nullcontext()
    ranks = _ranks(mesh, dims)
    watch = call_watch(dist.get_rank())
    watch.records.record(label, ranks)
    return watch.watching(label, frozenset(ranks)) if mesh.device_type == "cpu" else nullcontext()


def record_alike(tensor: DTensor, label: str, *, on_replicas: bool) -> None:
    """Record what all ranks of a tensor do alike, for the comparison in the next step. Sends nothing.

    Args:
        tensor: The tensor.
        label: Text of what they do, the same on all of them.
        on_replicas: Whether ranks with the same part do it, too; else those with different parts.
    """
    dims = range(tensor.device_mesh.ndim) if on_replicas else _split_dims(tensor)
    if dims and tensor.device_mesh.size() > 1 and dist.is_initialized():
        call_watch(dist.get_rank()).records.record(label, _ranks(tensor.device_mesh, dims), is_ordered=False)


def compare_value(value: torch.Tensor, device: torch.device, origin: str) -> None:
    """Let the next step compare what must be the same on all ranks. Sends nothing.

    Args:
        value: Digest of a plain tensor, an int64 scalar.
        device: Device of the model.
        origin: Name of the tensor, or origin of what it becomes part of; see `engine.origins`.
    """
    if dist.is_initialized():
        factor = 2 * zlib.crc32(origin.encode()) + 1
        call_watch(dist.get_rank()).records.compare(factor * value.to(device, non_blocking=True))


def _ranks(mesh: DeviceMesh, dims: Sequence[int]) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group(dims[0])) if len(dims) == 1 else mesh.mesh.flatten().tolist()


def _gather(tensor: DTensor) -> torch.Tensor:
    shardings = [(dim, placement) for dim, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    if tensor.device.type != "cpu" or is_partial(tensor) or len(shardings) != 1:
        replicated = DTensor.redistribute(tensor, placements=[Replicate()] * tensor.device_mesh.ndim)
        return DTensor.to_local(replicated)
    ((mesh_dim, placement),) = shardings
    return _all_gather(tensor, tensor.device_mesh.get_group(mesh_dim), placement.dim)


def mean_over_ranks(tensor: torch.Tensor, mesh: DeviceMesh, origin: str = "") -> torch.Tensor:
    """The mean of the ranks' tensors of one shape. Collective.

    The ranks are those of the mesh. For `origin` see `engine.origins`.

    Cost: an all-reduce of the tensor over each axis of the mesh.
    """
    total = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    total.copy_(tensor).div_(mesh.size())  # a gradient may have no memory (autograd's zeros) or expanded dimensions
    with _recorded(mesh, f"mean of {_described(tensor, origin)}"):
        for dim in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(dim))
    return total


def agreed_number(tensor: DTensor) -> int:
    """A random number, the same on all ranks of a tensor's mesh. Collective.

    Every rank draws one from torch's default generator, and rank 0's is taken. So ranks may have different generators,
    and seeding all of them again repeats the numbers.

    Cost: a broadcast of 8 bytes over each axis of the mesh, for which the host waits.
    """
    mesh = tensor.device_mesh
    number = torch.randint(_NUM_SEEDS, (1,), device="cpu").to(mesh.device_type)
    with _recorded(mesh, f"random numbers for {_described(tensor, '')}"):
        for dim in range(mesh.ndim):
            dist.broadcast(number, group=mesh.get_group(dim), group_src=0)
    return int(number)


def are_equal(one: DTensor, other: DTensor, origin: str) -> bool:
    """Whether tensors of one placement are equal on all ranks. Collective. For `origin` see `engine.origins`."""
    differs = not (one.shape == other.shape and torch.equal(one._local_tensor, other._local_tensor))
    return not mean_over_ranks(torch.tensor(float(differs), device=one.device), one.device_mesh, origin).item()


def have_equal_values(tensor: DTensor) -> bool:
    """Whether a replicated tensor is the same on all ranks. Collective."""
    local = full_tensor(tensor).reshape(-1)
    bounds = torch.cat([local, -local])
    mesh = tensor.device_mesh
    with _recorded(mesh, "comparison of a loss of sharded tensors alone"):
        for dim in range(mesh.ndim):
            dist.all_reduce(bounds, dist.ReduceOp.MAX, mesh.get_group(dim))
    return not bool((bounds != torch.cat([local, -local])).logical_and(bounds == bounds).any())


def _all_gather(tensor: DTensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Gather shards as bytes, since gloo does not support every dtype. All have one size; the last ones are padded."""
    local, length, degree = tensor.to_local(), tensor.shape[dim], group.size()
    rows = -(-length // degree)
    padded = local.new_zeros(*local.shape[:dim], rows, *local.shape[dim + 1 :])
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    pieces = [torch.empty_like(padded) for _ in range(degree)]
    dist.all_gather([piece.view(-1).view(torch.uint8) for piece in pieces], padded.view(-1).view(torch.uint8), group)
    return torch.cat(pieces, dim).narrow(dim, 0, length).contiguous()
