"""Sharded parameters and gradients as users see them.

A sharded parameter is a DTensor with the name and the global shape of the plain parameter. Its local part is a view of
the optimizer arena. Reading `grad` finishes pending reductions, so clipping, logging and stepping use the mean over all
ranks in any training loop. Setting `grad` to None clears the accumulators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from mics_strategy.comm.placement import full_tensor
from mics_strategy.errors import LifecycleError

if TYPE_CHECKING:
    from mics_strategy.comm.placement import ReplicaRandom, ShardPlacement
    from mics_strategy.engine.layout import ParamSlice

_raw_grad: Any = torch.Tensor.grad  # the descriptor under the property below
fast_attributes: Any = torch._C.DisableTorchFunctionSubclass
"""Context that reads attributes of these tensors without a search for `__torch_function__` in their class."""
_MIXED = "got mixed torch.Tensor and DTensor"  # in an error of torch


class GradientLink(Protocol):
    """The engine's interface to the gradients of one bucket's parameters."""

    def finish_gradients(self) -> None:
        """Finish pending reductions of all gradients. Collective."""

    def clear_gradient(self, position: int) -> None:
        """Clear the gradient of the parameter at `position`, including pending parts."""

    def settle_gradient(self, position: int) -> None:
        """An optimizer has used the gradient of the parameter at `position`."""

    def unsharded(self, position: int) -> nn.Parameter | None:
        """The unsharded parameter at `position`; None when the model was deleted."""


class _FullTensorDTensor(DTensor):
    """A DTensor with our own `full_tensor`, comparisons and random numbers.

    `full_tensor`, `torch.equal` and `torch.allclose` are collective. Random numbers drawn into it, or like it, are the
    same on all replicas of a shard.
    """

    mics_random: ReplicaRandom

    @override
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank. Collective over the ranks of its mesh."""
        if torch.is_grad_enabled() and self.requires_grad:
            return super().full_tensor(grad_placements=grad_placements)
        return full_tensor(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation as a DTensor, except where DTensor's support is partial."""
        if func is torch.ops.aten.equal.default:
            return _are_equal(*args)
        if func is torch.ops.aten.allclose.default:
            return _are_close(*args, **(kwargs or {}))
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(*args)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _run_random_op(func, args, kwargs or {})
        try:
            return super().__torch_dispatch__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise LifecycleError(_mixed_operands_message(error, args)) from error

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copied = memo[id(self)] = self.detach().clone()
        return cast("DTensor", copied)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


class ShardedGradient(_FullTensorDTensor):
    """The gradient of a `ShardedParameter`.

    Results computed from it, including copies, are plain DTensors.
    """


@dataclass(slots=True)
class WriteCount:
    """Number of writes to the parameters of one bucket, besides torch's counts."""

    num: int = 0


class ShardedParameter(_FullTensorDTensor):
    """A parameter of which this rank holds one shard.

    Reading `grad` is collective while reductions are pending, which is after a backward and before the first read. Like
    every DTensor operation that communicates, it must run on all ranks or on none.

    Attributes:
        mics_name: Name of the parameter in the model.
        mics_link: Link to the engine and to the gradient.
        mics_position: Position of the parameter in its bucket.
        mics_writes: Writes to the parameters of the bucket that torch's version counters may miss.
        mics_slice: Slice of the parameter in its bucket.
        mics_index: Index of this rank's shard.
    """

    mics_name: str
    mics_link: GradientLink
    mics_position: int
    mics_writes: WriteCount
    mics_slice: ParamSlice
    mics_index: int

    @property
    def grad(self) -> torch.Tensor | None:
        """The mean gradient over all ranks and micro-steps so far, or None."""
        self.mics_link.finish_gradients()
        return self.raw_grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and value is self.raw_grad:
            return
        self.mics_link.clear_gradient(self.mics_position)
        self.raw_grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def raw_grad(self) -> torch.Tensor | None:
        """The content of autograd's own gradient slot. Reading it finishes no reduction."""
        grad: torch.Tensor | None = _raw_grad.__get__(self)
        return grad

    @raw_grad.setter
    def raw_grad(self, value: torch.Tensor | None) -> None:
        _raw_grad.__set__(self, value)

    @property
    def data(self) -> torch.Tensor:
        """An alias that shares the version counter, so the engine detects writes to it."""
        alias = self.detach()
        alias.__class__ = _FullTensorDTensor
        cast("_FullTensorDTensor", alias).mics_random = self.mics_random
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise LifecycleError(
                f"`{self.mics_name}` is sharded as {tuple(self.shape)} {self.dtype} and cannot become "
                f"{tuple(value.shape)} {value.dtype}. Change the model before `shard()`."
            )
        with torch.no_grad():
            self.copy_(value)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard: a view of the optimizer arena."""
        return self._local_tensor

    def like_self(self, local: torch.Tensor) -> DTensor:
        """A DTensor of this parameter's shape and placements, with local part `local`."""
        return DTensor.from_local(
            local, self.device_mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride()
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and count its writes, as torch misses those into lists."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for parameter in value if isinstance(value, (list, tuple)) else (value,):
                        if isinstance(parameter, ShardedParameter):
                            parameter.mics_writes.num += 1
        return result

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain DTensor with this rank's part."""
        return self.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def _refuse_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise LifecycleError(
            f"A gradient hook on the sharded parameter `{self.mics_name}` would never run, because autograd sees the "
            "unsharded parameter. Read `grad` after the backward, or register a hook on the module's outputs."
        )

    register_hook = _refuse_hook
    register_post_accumulate_grad_hook = _refuse_hook

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise LifecycleError(
            f"`{self.mics_name}` is sharded and cannot be deep-copied with its model. "
            "Copy the plain model before `shard()`, or build a new model and load `full_state_dict()`."
        )


def _run_random_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a random operation on shards.

    Replicas of a shard draw equal numbers, and different shards different ones.
    """
    like = next(arg for arg in args if isinstance(arg, _FullTensorDTensor))
    local_args, local_kwargs = tree_map_only(DTensor, lambda tensor: tensor._local_tensor, (args, kwargs))
    with like.mics_random.drawing():
        drawn = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        return args[0]

    def as_like(local: torch.Tensor) -> torch.Tensor:
        if local.shape != like._local_tensor.shape:
            return local
        stride = like.stride()
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
        )

    return tree_map_only(torch.Tensor, as_like, drawn)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """`torch.equal` for pairs that DTensor does not support.

    Collective if the shapes are equal.
    """
    if one is other or one.shape != other.shape:
        return one is other
    with torch.no_grad():
        if isinstance(one, DTensor) and isinstance(other, DTensor) and one.placements == other.placements:
            differs = torch.tensor(float(not torch.equal(one._local_tensor, other._local_tensor)), device=one.device)
            counted = DTensor.from_local(differs, one.device_mesh, [Partial()] * one.device_mesh.ndim, run_check=False)
            return not counted.full_tensor().item()
        return torch.equal(*(full_tensor(tensor) if isinstance(tensor, DTensor) else tensor for tensor in (one, other)))


def _are_close(one: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """`torch.allclose` of whole tensors, which DTensor does not support. Collective."""
    with torch.no_grad():
        a, b = (full_tensor(tensor) if isinstance(tensor, DTensor) else tensor for tensor in (one, other))
        return torch.allclose(a, b, *args, **kwargs)


def _unscale(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Unscale gradients for a `GradScaler`, with overflows of all ranks. Collective.

    DTensor's own implementation shares them along the placements of the first gradient only, and not at all if that is
    a scalar's.
    """
    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    unscale([grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads], found_inf, inv_scale)
    mesh = next(grad.device_mesh for grad in grads if isinstance(grad, DTensor))
    names = mesh.mesh_dim_names or ()
    placements = [Partial("max") if name == "shard" else Replicate() for name in names]
    found_inf.copy_(DTensor.from_local(found_inf, mesh, placements, run_check=False).full_tensor())


def _mixed_operands_message(error: RuntimeError, args: tuple[Any, ...]) -> str:
    """Error text for an operation on a sharded and a plain tensor."""
    name = next((f"`{arg.mics_name}`" for arg in args if isinstance(arg, ShardedParameter)), "A gradient")
    return (
        f"{name} is sharded, but was used with a plain tensor (torch: {error}). To compare or compute with the whole "
        "tensor, call `full_tensor()` of it on every rank. In a forward, use a parameter inside of the module that "
        "owns it, where it is unsharded."
    )


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether ranks hold different parts of a parameter."""
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)


def make_sharded_parameter(
    master: torch.Tensor, slice_: ParamSlice, placement: ShardPlacement, writes: WriteCount, *, requires_grad: bool
) -> ShardedParameter:
    """Wrap this rank's part of a parameter in a sharded parameter.

    Args:
        master: [shard_numel], the bucket's piece of the optimizer arena. It stays the storage.
        slice_: Slice of the parameter in the bucket.
        placement: Index of this rank's shard, and device mesh of all shards.
        writes: Count of writes of the bucket.
        requires_grad: Whether the plain parameter requires gradients.
    """
    tensor = as_dtensor(slice_.view_in(master, placement.index), slice_, placement)
    parameter = nn.Parameter(tensor, requires_grad=requires_grad)
    sharded = cast("ShardedParameter", parameter)
    sharded.__class__ = ShardedParameter
    sharded.mics_name = slice_.name
    sharded.mics_writes = writes
    sharded.mics_slice = slice_
    sharded.mics_index = placement.index
    sharded.mics_random = placement.random
    if requires_grad:
        placements = sharded.placements
        cast("Any", torch.Tensor).register_hook(sharded, lambda grad: _like_parameter(grad, placements))
    return sharded


def grad_as_dtensor(local: torch.Tensor, param_slice: ParamSlice, placement: ShardPlacement) -> ShardedGradient:
    """Wrap this rank's part of a gradient in a `ShardedGradient`; see `as_dtensor`."""
    dtensor = as_dtensor(local, param_slice, placement)
    dtensor.__class__ = ShardedGradient
    gradient = cast("ShardedGradient", dtensor)
    gradient.mics_random = placement.random
    return gradient


def _like_parameter(grad: torch.Tensor, placements: tuple[Placement, ...]) -> torch.Tensor:
    """Redistribute the gradient of a penalty on the parameter to its placements."""
    return grad.redistribute(placements=placements) if isinstance(grad, DTensor) else grad


def as_dtensor(local: torch.Tensor, param_slice: ParamSlice, placement: ShardPlacement) -> DTensor:
    """A DTensor with the local part `local` and the global shape of a parameter slice.

    Args:
        local: Part of this rank, a view of a flat shard.
        param_slice: Slice of the parameter in its bucket.
        placement: Index of this rank's shard, and device mesh of all shards.
    """
    mesh = placement.device_mesh
    names = mesh.mesh_dim_names or ()
    shard_placement: Placement = (
        Replicate() if param_slice.dim is None or placement.degree == 1 else Shard(param_slice.dim)
    )
    placements = [Replicate() if name == "replicate" else shard_placement for name in names]
    stride = torch.empty(param_slice.shape, device="meta").stride()
    local_part = _with_own_storage(local)
    return DTensor.from_local(local_part, mesh, placements, run_check=False, shape=param_slice.shape, stride=stride)


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory whose storage holds nothing else.

    torch saves and deep-copies whole storages, so a view of an arena would bring the whole arena along. A DTensor also
    takes over the storage offset of its local part, which is meaningless for it.
    """
    if view.is_meta:
        return view
    start = view.storage_offset() * view.itemsize
    storage: Any = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())
