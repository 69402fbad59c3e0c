"""Sharded parameters and gradients as users see them.

A sharded parameter is a DTensor with the name and the global shape of the plain parameter. Its local part is a view of
the optimizer arena. Reading `grad` finishes pending reductions, so clipping, logging and stepping use the mean over all
ranks in any training loop. Setting `grad` to None clears the accumulators.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import _foreach_supported_types
from typing_extensions import override

from mics_strategy.comm.placement import ShardPlacement, compare_value, full_tensor, is_sharded, like_tensor
from mics_strategy.engine.exact_dtensor import ExactDTensor, as_exact, mean_gradient
from mics_strategy.engine.layout import ParamSlice
from mics_strategy.engine.storage_guard import with_own_storage
from mics_strategy.engine.tensor_memory import TensorMemory, WriteCount, digest_of_places
from mics_strategy.errors import LifecycleError

_new_dtensor: Any = DTensor  # `from_local` and `nn.Parameter` dispatch operations, which costs more than all else
_numbers = itertools.count(1 << 40)  # above what scripts have as keys beside parameters, below addresses
fast_attributes: Any = torch._C.DisableTorchFunctionSubclass
"""Context that reads attributes of these tensors without a search for `__torch_function__` in their class."""


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

    def sharded(self, position: int) -> ShardedParameter | None:
        """The sharded parameter at `position`; None when the model was deleted."""


class ShardedParameter(ExactDTensor):
    """A parameter of which this rank holds one shard.

    Reading `grad` is collective while reductions are pending, which is after a backward and before the first read. Like
    every DTensor operation that communicates, it must run on all ranks or on none.

    Attributes:
        mics_name: Name of the parameter in the model.
        mics_link: Link to the engine and to the gradient.
        mics_position: Position of the parameter in its bucket.
        mics_memory: Its memory, with the writes to the parameters of the bucket that torch's version counters may miss.
        mics_slice: Slice of the parameter in its bucket.
        mics_index: Index of this rank's shard.
        mics_number: Number of the parameter among all of this process.
        raw_grad: Autograd's own gradient slot. Reading it finishes no reduction, setting it clears nothing.
        raw_version: Torch's own count of writes.
    """

    mics_name: str
    mics_link: GradientLink
    mics_position: int
    mics_memory: TensorMemory
    mics_slice: ParamSlice
    mics_index: int
    mics_number: int
    raw_grad = torch.Tensor.grad  # the descriptors under the properties below
    raw_version = torch.Tensor._version

    @property
    def grad(self) -> torch.Tensor | None:
        """The mean gradient over all ranks and micro-steps so far, or None."""
        self.mics_link.finish_gradients()
        return self.raw_grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None or value is self.raw_grad:
            if value is None:
                self.mics_link.clear_gradient(self.mics_position)
                self.raw_grad = None
            return
        whole: torch.Tensor | None = None
        if value.shape == self.shape and getattr(value, "placements", None) != self.placements:
            whole = full_tensor(value) if isinstance(value, DTensor) else value
            if is_sharded(self) and not isinstance(value, DTensor):
                compare_value(digest_of_places(whole), self.device, self.mics_origin)
            value = self.like_self(self.mics_slice.narrow(whole.detach(), self.mics_index).clone())
        if value.shape != self.shape or value.dtype != self.dtype:
            self.raw_grad = value  # torch refuses it, before anything is cleared
        self.mics_link.clear_gradient(self.mics_position)
        if isinstance(value, ExactDTensor) and value.mics_memory is None:
            value.mics_memory = TensorMemory(finish=self.mics_link.finish_gradients)
            if whole is not None:
                self.raw_grad = None  # which may be a copy of the same tensor
                value.mics_memory.watch(f"The gradient of `{self.mics_name}`", whole, value.numel())
        self.raw_grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    _grad = grad  # torch's other name of it

    @property
    def _version(self) -> int:  # type: ignore[override]
        """Number that grows with each write, also one of an optimizer, which writes to this rank's part."""
        return int(self.raw_version + self._local_tensor._version + self.mics_memory.writes.num)

    @override
    def __hash__(self) -> int:
        return self.mics_number  # not an address: sets of parameters have one order on all ranks

    @override
    def __eq__(self, other: object) -> Any:
        return other.mics_number == self.mics_number if isinstance(other, LocalParameter) else super().__eq__(other)

    @property
    @override
    def mics_label(self) -> str:
        return f"`{self.mics_name}`"

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard: a view of the optimizer arena."""
        return self._local_tensor

    def like_self(self, local: torch.Tensor, origin: str = "") -> DTensor:
        """A DTensor of this parameter's shape and placements, with local part `local`."""
        return as_exact(like_tensor(local, self), self.mics_random, origin or self.mics_origin)

    @override
    def mics_before_read(self) -> None:
        super().mics_before_read()
        if torch.is_grad_enabled() and self.requires_grad:
            self.mics_memory.may_have_node = TensorMemory.has_checks = True

    def check_use(self) -> None:
        """Check what a script has done that a forward would not follow.

        Raises:
            LifecycleError: It has written to a tensor that it had assigned before, or hooks autograd's node.
        """
        self.mics_memory.check_assigned()
        self.check_hooks()

    def check_hooks(self) -> None:
        """Check that no script has hooks on autograd's node.

        Raises:
            LifecycleError: One has.
        """
        if self.mics_memory.may_have_node and has_node_hooks(self):
            self._refuse_hook()

    def _refuse_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise LifecycleError(
            f"A gradient hook on the sharded parameter `{self.mics_name}` would never run, because autograd sees the "
            "unsharded parameter. Read `grad`, change it and step optimizers after the backward (gradients stay in "
            "buffers that `shard()` allocated, so a step in the backward would free no memory), or register a hook on "
            "the module's outputs."
        )

    register_hook = _refuse_hook
    register_post_accumulate_grad_hook = _refuse_hook


class ProxyParameter(nn.Parameter):
    """A tensor in the place of a sharded parameter, with which it shares its attributes. Copies of it are plain.

    Attributes:
        mics_link: See `ShardedParameter`.
        mics_position: See `ShardedParameter`.
        mics_number: See `ShardedParameter`.
    """

    mics_link: GradientLink
    mics_position: int
    mics_number: int

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter, without attributes. Those of the engine are among them."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class LocalParameter(ProxyParameter):
    """The tensor in the body of an optimizer's step.

    Sets and dicts take it and the sharded parameter for the same: a script may have made them before (parameters
    without weight decay, initial weights by parameter).
    """

    @override
    def __hash__(self) -> int:
        return self.mics_number

    @override
    def __eq__(self, other: object) -> Any:
        return other.mics_number == self.mics_number if isinstance(other, ShardedParameter) else super().__eq__(other)


_foreach_supported_types.append(cast("Any", LocalParameter))  # or torch would update each one for itself on GPUs


def has_node_hooks(parameter: torch.Tensor) -> bool:
    """Whether a script has hooks on the node that accumulates the gradient of a parameter.

    Scripts get this node from an operation on the parameter (`parameter.expand_as(parameter)`).
    """
    if not parameter.requires_grad or parameter.is_inference():
        return False
    with torch.inference_mode(False), torch.enable_grad(), fast_attributes(), torch._C._DisableTorchDispatch():
        view: Any = parameter.view_as(parameter)  # for its node alone
    if view.grad_fn is None:  # inside of a transform of `torch.func`
        return False
    node = view.grad_fn.next_functions[0][0]
    handles = [register(lambda *_: None) for register in (node.register_hook, node.register_prehook)]
    is_hooked = any(len(handle.hooks_dict_ref()) > 1 for handle in handles)
    for handle in handles:
        handle.remove()
    return is_hooked


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
    plain = as_dtensor(slice_.view_in(master, placement.index), slice_, placement)
    tensor = as_exact(plain, placement.random, _origin(slice_, placement))
    parameter = _new_dtensor(tensor._local_tensor.detach(), tensor._spec, requires_grad=requires_grad)
    parameter.__class__, parameter._is_param = ShardedParameter, True  # as torch marks parameters of other classes
    sharded = cast("ShardedParameter", parameter)
    sharded.mics_name = slice_.name
    sharded.mics_slice = slice_
    sharded.mics_index = placement.index
    sharded.mics_random, sharded.mics_origin = placement.random, tensor.mics_origin
    if requires_grad:
        cast("Any", torch.Tensor).register_hook(sharded, functools.partial(_mean_like, tensor))  # keeps no parameter
    sharded.mics_memory = TensorMemory(writes)
    sharded.mics_number = next(_numbers)
    return sharded


def _mean_like(tensor: ExactDTensor, grad: torch.Tensor) -> torch.Tensor | None:
    return mean_gradient(grad, tensor)


def move_to_mesh(tensor: DTensor, mesh: DeviceMesh) -> None:
    """Let a tensor that is sharded over one dimension of its mesh be sharded so over another mesh.

    Args:
        tensor: Tensor, whose local part stays.
        mesh: Mesh in which this rank has the same shard; its dimensions are named as those of the former one.
    """
    former = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    placements = tuple(former.get(name, Replicate()) for name in mesh.mesh_dim_names or ())
    tensor._spec = DTensorSpec(mesh, placements, tensor._spec.tensor_meta)


def move_parameter(sharded: ShardedParameter, mesh: DeviceMesh) -> None:
    """Move a parameter to another mesh; see `move_to_mesh`. Its gradient is dropped."""
    sharded.raw_grad = None
    move_to_mesh(sharded, mesh)
    hooks: dict[int, Any] = sharded._backward_hooks or {}  # only the own one: others are refused
    for hook in hooks.values():
        move_to_mesh(hook.args[0], mesh)


def grad_as_dtensor(
    local: torch.Tensor, param_slice: ParamSlice, placement: ShardPlacement
) -> tuple[ExactDTensor, TensorMemory]:
    """Wrap this rank's part of a gradient, with its memory; see `as_dtensor`."""
    origin = f"the gradient of {_origin(param_slice, placement)}"
    grad = as_exact(as_dtensor(local, param_slice, placement), placement.random, origin)
    grad.mics_memory = memory = TensorMemory()
    return grad, memory


def _origin(param_slice: ParamSlice, placement: ShardPlacement) -> str:
    """See `engine.origins`. Parameters of two models may have one name."""
    return param_slice.name if placement.model == 0 else f"{param_slice.name} of model {placement.model}"


def as_dtensor(local: torch.Tensor, param_slice: ParamSlice, placement: ShardPlacement) -> DTensor:
    """A DTensor with the local part `local` and the global shape of a parameter slice.

    Args:
        local: Part of this rank, a view of a flat shard.
        param_slice: Slice of the parameter in its bucket.
        placement: Index of this rank's shard, and device mesh of all shards.
    """
    key = param_slice.shape, param_slice.dim, local.dtype
    spec = placement.specs.get(key)
    if spec is None:
        dim = param_slice.dim
        shard: Placement = Replicate() if dim is None or placement.degree == 1 else Shard(dim)
        names = placement.device_mesh.mesh_dim_names or ()
        placements = tuple(Replicate() if name == "replicate" else shard for name in names)
        stride = torch.empty(param_slice.shape, device="meta").stride()
        meta = TensorMeta(param_slice.shape, stride, local.dtype)
        spec = placement.specs[key] = DTensorSpec(placement.device_mesh, placements, meta)
    return cast("DTensor", _new_dtensor(with_own_storage(local), spec, requires_grad=False))
