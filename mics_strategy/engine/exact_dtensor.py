"""DTensors whose operations have the results of whole tensors.

torch's DTensor leaves three things to its user, each of which is wrong without an error where a script does not know
that its tensor is sharded: a reduction to a scalar holds this rank's part of it, a view of sharded rows is a copy whose
writes are lost, and a gradient that reaches a gathered copy is this rank's own. Parameters, gradients and all that is
computed from them are `ExactDTensor`s instead:

- An operation that needs no other rank's rows runs on the shards, as torch's DTensor does. A reduction is finished at
  once, so no result is partial.
- Any other operation runs on whole tensors, which are gathered for it. Every rank computes the same result, and keeps
  its rows of what the operation wrote.
- A view of gathered rows remembers its base (`GatheredBase`): what is written to it is written to the base.
- What ranks compute together, they must compute alike: `engine.origins`.
- An operation with a plain tensor has a plain result, because that tensor is this rank's own. Its gradient is this
  rank's, too: where a plain gradient arrives at a parameter, the mean over all ranks is taken (`mean_gradient`).

Operations that gather are collective. Like every DTensor operation that communicates, they run on all ranks or on none.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from mics_strategy.comm.placement import (
    ReplicaRandom,
    agreed_number,
    are_equal,
    is_partial,
    is_replicated,
    is_sharded,
    like_tensor,
    mean_over_ranks,
    record_alike,
    sum_parts,
)
from mics_strategy.comm.process import check_not_forked
from mics_strategy.engine import gathered_views, op_locality, op_schema
from mics_strategy.engine.gathered_views import GatheredBase, Wholes, gather, gathered_of, keep_part, version_of
from mics_strategy.engine.grad_scaler import unscale
from mics_strategy.engine.op_locality import in_backward, is_of_shards, mixes_plain, needs_other_rows
from mics_strategy.engine.op_schema import is_view, tensors_in, writes_plain, written_by
from mics_strategy.engine.origins import moment, origin_now, origin_of
from mics_strategy.engine.pickled_parts import part_of_rank
from mics_strategy.engine.python_values import PythonValues
from mics_strategy.engine.tensor_memory import TensorMemory, compare_values, follow_overwritten
from mics_strategy.engine.torch_2_11 import run_function
from mics_strategy.engine.user_collectives import run_collective
from mics_strategy.errors import LifecycleError

_aten = torch.ops.aten
_FILLED_BY_BACKWARDS = (_aten.zeros_like.default, _aten.new_zeros.default)  # with gradients of this rank, perhaps


class ExactDTensor(PythonValues, DTensor):
    """A DTensor whose operations have the results of the whole tensor.

    Attributes:
        mics_random: Seeds for random numbers drawn into it, the same on all replicas of a shard.
        mics_memory: Memory of the engine that it shares; None if it shares none.
        mics_gathered: Base whose gathered rows it views; None if it views none.
        mics_origin, mics_moment: What its values were computed from, and when; see `engine.origins`.
        mics_is_own: Whether every rank has its own values, which a script has written into a result.
    """

    mics_random: ReplicaRandom
    mics_memory: TensorMemory | None = None
    mics_gathered: GatheredBase | None = None
    mics_origin: str = ""
    mics_moment: int = 0
    mics_is_own: bool = False

    @property
    def data(self) -> torch.Tensor:
        """An alias that shares the version counter, so the engine detects writes to it."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Behave as if this tensor were moved to the memory of `value`. The engine's own tensors stay where they are.

        Aliases keep their values, as scripts expect that swap averaged weights and weights. From now on `value` is an
        alias of the engine's tensor. Others than alike ones are copied; a write to them is an error at the next use.
        """
        if value.shape != self.shape or value.dtype != self.dtype:
            raise LifecycleError(
                f"{self.mics_label} is sharded as {tuple(self.shape)} {self.dtype} and cannot become "
                f"{tuple(value.shape)} {value.dtype}. Change the model before `shard()`."
            )
        memory = self.mics_memory
        alike = value if isinstance(value, ExactDTensor) and value._spec == self._spec else None
        is_alias = alike is not None and alike.mics_memory is memory  # addresses do not tell where a part is empty
        if is_alias and (memory is not None or cast("ExactDTensor", alike).data_ptr() == self.data_ptr()):
            return
        gathered = value.mics_gathered if isinstance(value, ExactDTensor) else None
        shared = getattr(value if gathered is None else gathered.base, "mics_memory", None)
        if memory is None or id(self) in memory.shared:
            self._local_tensor, self.mics_memory = torch.empty_like(self._local_tensor), None
        elif shared not in (None, memory):
            raise LifecycleError(
                f"{self.mics_label} would share memory with another parameter or gradient, and follow its changes. "
                "Copy the values: `.data.copy_(value)`, or assign `value.clone()`."
            )
        else:
            memory.leave()
        with torch.no_grad():
            self.copy_(value)
        if self.mics_memory is not None:
            self.mics_memory.watch(self.mics_label, getattr(value, "_local_tensor", value), self.numel())
            if alike is not None:
                self.mics_memory.give(alike, self)

    @override
    def data_ptr(self) -> int:
        """Address of this rank's part, or another number that only its aliases share where that part is empty."""
        return self._local_tensor.data_ptr() or id(self._local_tensor)

    def mics_before_read(self) -> None:
        """See `TensorMemory.before_read`."""
        if self.mics_memory is not None:
            self.mics_memory.before_read()

    @property
    def mics_is_result(self) -> bool:
        """Whether this rank has it whole, in memory that is no parameter's or gradient's."""
        return is_replicated(self) and self.mics_memory is None and self.mics_gathered is None

    def finish_sum(self) -> None:
        """Reduce what ranks have a part of, in place. Collective."""
        check_not_forked()
        whole = sum_parts(as_torch_dtensor(self), self.mics_origin)
        self._local_tensor, self._spec = whole._local_tensor, whole._spec

    @property
    def mics_label(self) -> str:
        """Name of the tensor in errors."""
        return "The tensor"

    @override
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """A copy of the whole tensor on every rank, which receives the mean of all ranks' gradients. Collective.

        Args:
            grad_placements: Placements of the gradient, if it is not this rank's own. See torch's DTensor.
        """
        self.mics_before_read()
        if self.mics_is_own:
            return self.clone()  # plain, and differentiable
        if not (torch.is_grad_enabled() and self.requires_grad):
            return gather(self)
        if grad_placements is not None:
            return super().full_tensor(grad_placements=grad_placements)
        return cast("torch.Tensor", _FullTensor.apply(self, True))  # type: ignore[no-untyped-call]

    @override
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part: its rows, or all of a replicated tensor."""
        self.mics_before_read()
        if is_partial(self):
            self.finish_sum()
        if grad_placements is None and torch.is_grad_enabled() and self.requires_grad and is_replicated(self):
            whole = self.clone() if self.mics_is_own else _FullTensor.apply(self, False)  # type: ignore[no-untyped-call]
            return cast("torch.Tensor", whole)
        local = super().to_local(grad_placements=grad_placements)
        return local if self.mics_memory is None or self.requires_grad else self.mics_memory.lend(local)

    @override
    def redistribute(self, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> DTensor:
        """The tensor with other placements. Collective if they are fewer shards.

        It is gathered as in `full_tensor`, since torch's own gather is not safe on gloo (`comm.placement`).
        """
        self.mics_before_read()
        tensor: DTensor = self
        if placements is not None and tuple(placements) != self.placements and not is_replicated(self):
            tensor = DTensor.from_local(self.full_tensor(), self.device_mesh, run_check=False)
        moved = DTensor.redistribute(tensor, device_mesh, placements, **kwargs)
        return as_exact(moved, self.mics_random, origin_now(self))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of which at least one argument is an `ExactDTensor`."""
        return _run(func, args, kwargs or {})

    if torch.__version__ < "2.12":  # which runs operations on any kind of DTensor by itself

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            """Run a function of torch, with its operations on an `ExactDTensor`."""
            return run_function(ExactDTensor, _run, func, args, kwargs or {})

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copied = memo[id(self)] = self.detach().clone()
        return cast("DTensor", copied)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as torch's DTensor, with this rank's part."""
        tensor = as_torch_dtensor(self)
        return tensor.__reduce_ex__(protocol) if is_replicated(self) else (part_of_rank, (tensor, dist.get_rank()))


# As torch does for DTensor: `clip_grad_norm_` otherwise reduces the norm of each gradient for itself.
_foreach_supported_types.append(cast("Any", ExactDTensor))


def as_exact(tensor: DTensor, random: ReplicaRandom, origin: str) -> ExactDTensor:
    """Let a DTensor be an `ExactDTensor`, in place.

    Args:
        tensor: DTensor over the mesh of a sharded model.
        random: Seeds of this rank's shard.
        origin: Origin of its values.
    """
    if not isinstance(tensor, ExactDTensor):
        tensor.__class__ = ExactDTensor
        exact = cast("ExactDTensor", tensor)
        exact.mics_random, exact.mics_origin, exact.mics_moment = random, origin, moment()
    return cast("ExactDTensor", tensor)


def as_torch_dtensor(tensor: DTensor) -> DTensor:
    """A tensor of torch's own class on the same memory."""
    constructor: Any = DTensor
    return cast("DTensor", constructor(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad))


class _FullTensor(torch.autograd.Function):
    """The whole tensor, with the mean over all ranks of its gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: ExactDTensor, is_copy: bool) -> torch.Tensor:
        plain = cast("DTensor", tensor.detach())  # torch 2.11 gives a DTensor
        ctx.like = as_exact(plain, tensor.mics_random, tensor.mics_origin)
        return gather(tensor) if is_copy else plain._local_tensor.view_as(plain._local_tensor)  # autograd marks it

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return mean_gradient(grad, ctx.like), None


def mean_gradient(grad: torch.Tensor, like: ExactDTensor) -> torch.Tensor:
    """The gradient of a parameter, in its placements. Collective if it is plain.

    Args:
        grad: A DTensor, which is the same gradient on all ranks; or a plain tensor, which is this rank's own: the mean
            over all ranks is taken.
        like: The parameter.
    """
    origin = f"the gradient of {like.mics_origin}"
    if isinstance(grad, DTensor):
        record_alike(like, f"{origin}, which is {getattr(grad, 'mics_origin', '')}", on_replicas=True)
    else:
        check_not_forked()
        grad = _replicated(mean_over_ranks(grad, like.device_mesh, origin), like, origin)
    return as_exact(cast("DTensor", grad), like.mics_random, origin).redistribute(placements=like.placements)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on shards if that is possible, else on whole tensors."""
    if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
        return unscale(*args)
    if func is _aten.equal.default and all(isinstance(a, DTensor) for a in args) and args[0]._spec == args[1]._spec:
        return are_equal(args[0], args[1], origin_of(func, args, kwargs))
    if func.namespace == "c10d":
        return run_collective(func, args, kwargs)
    if torch.is_inference_mode_enabled():
        made_of_others = func.decompose(*args, **kwargs)  # autograd would have, but it does not see inference mode
        if made_of_others is not NotImplemented:
            return made_of_others
        if is_view(func) and not args[0].is_inference():
            with torch.inference_mode(False), torch.no_grad():  # autograd gives a view the version counter of its base
                return _run(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:
        return _view_in_place(func, args, kwargs)
    is_flat = op_schema.are_flat(args, kwargs)
    tensors = [a for a in args if isinstance(a, torch.Tensor)] if is_flat else tensors_in((args, kwargs))
    exact = [tensor for tensor in tensors if isinstance(tensor, ExactDTensor)]
    if any(tensor.mics_is_own for tensor in exact):
        return _run_with_own(func, args, kwargs)
    follow_overwritten(func, args)
    origin = origin_of(func, args, kwargs)
    for tensor in exact:
        if func is not _aten.detach.default:
            tensor.mics_before_read()
        if tensor.mics_gathered is not None:
            tensor.mics_gathered.refresh()
        if is_partial(tensor) and func is not _aten.stack.default:  # stacked norms are reduced at once
            tensor.finish_sum()
    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    has_rows = bool(plain) and any(is_sharded(gathered_views.base_of(tensor)) for tensor in exact)
    is_mixed = writes_plain(func, args, kwargs) or mixes_plain(func, tensors, has_rows=has_rows)
    written = list(written_by(func, args, kwargs))
    if has_rows and (not is_mixed or any(is_sharded(gathered_views.base_of(each)) for each in written)):
        compare_values(plain, exact[0], origin)
    if is_mixed or (func in _FILLED_BY_BACKWARDS and in_backward()):
        result = _run_with_plain(func, args, kwargs)
    elif op_schema.fills_with_random_numbers(func, kwargs) and exact[0].mics_gathered is None:
        result = _fill(func, args, kwargs, exact[0], origin)
    elif torch.Tag.nondeterministic_seeded in func.tags or needs_other_rows(func, args, kwargs):
        result = _run_on_whole(func, args, kwargs, exact[0], origin)
    else:
        result = _run_on_shards(func, args, kwargs, exact[0], origin)
    shared = None
    for tensor in written:
        if tensor.mics_memory is not None:
            tensor.mics_memory.count_write()
        if tensor.mics_gathered is not None:
            tensor.mics_gathered.write_back()
        base = gathered_views.base_of(tensor)
        if base.mics_memory is None:
            base.mics_origin, base.mics_moment = origin, moment()
            base.mics_is_own |= bool(plain) and is_of_shards(base) and is_replicated(base)
        elif shared is None and is_sharded(base):
            shared = base
    if shared is not None:  # ranks have other rows of it; that replicas are equal is checked elsewhere
        record_alike(shared, f"the write {origin}", on_replicas=False)
    return op_schema.returned_by(func, args, kwargs, result)


def _run_with_own(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation with plain tensors in the place of those that are each rank's own."""

    def plain(tensor: ExactDTensor) -> torch.Tensor:
        return tensor._local_tensor if tensor.mics_is_own else tensor

    plain_args, plain_kwargs = op_schema.map_arguments(ExactDTensor, plain, args, kwargs)
    return op_schema.returned_by(func, args, kwargs, func(*plain_args, **plain_kwargs))


def _view_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change the shape of a tensor that shares no memory of the engine.

    Raises:
        LifecycleError: It does.
    """
    tensor = args[0]
    if not isinstance(tensor, ExactDTensor):
        raise LifecycleError(
            f"`{func._schema.name}` would give a plain tensor the memory of a sharded one, of which this rank has a "
            "part. Copy the values: `tensor.copy_(parameter.full_tensor())`."
        )
    if tensor.mics_memory is not None or tensor.mics_gathered is not None:
        raise LifecycleError(
            f"`{func._schema.name}` would change the shape or the memory of a sharded tensor in place. Compute a new "
            "tensor, or copy the values (`parameter.data.copy_(values)`)."
        )
    cast("Any", tensor).__class__ = DTensor  # torch changes the shape of the object itself
    try:
        func(*args, **kwargs)
    finally:
        tensor.__class__ = ExactDTensor
    return tensor


def _run_on_shards(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: ExactDTensor, origin: str) -> Any:
    """Run an operation as torch's DTensor does; finish a reduction."""
    if func is _aten.detach.default:  # the most frequent operation, of which torch would work out what is known
        local = like._local_tensor if like.mics_memory is not None else like._local_tensor.detach()  # counts its writes
        result = cast("Any", DTensor)(local, like._spec, requires_grad=False)
    elif op_locality.is_elementwise(func, args, kwargs):
        result = op_locality.run_on_parts(func, args, kwargs)
    else:
        shard_args, shard_kwargs = op_schema.map_arguments(ExactDTensor, as_torch_dtensor, args, kwargs)
        result = func(*shard_args, **shard_kwargs)
    if isinstance(result, DTensor):
        as_exact(result, like.mics_random, origin)
    else:
        result = tree_map_only(DTensor, lambda tensor: as_exact(tensor, like.mics_random, origin), result)
    if isinstance(result, ExactDTensor) and is_partial(result):
        result.finish_sum()
    if is_view(func):
        for view in tensors_in(result):
            view.mics_gathered = like.mics_gathered
            if like.mics_memory is not None:
                like.mics_memory.add(view)
    return result


def _run_on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: ExactDTensor, origin: str) -> Any:
    """Run an operation on gathered tensors. Its results are replicas over `like`'s mesh. Collective."""
    gathered_views.check_strides(func, args[0])
    wholes = Wholes()
    whole_args, whole_kwargs = tree_map_only(DTensor, wholes.of, (args, kwargs))
    has_common_seed = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
    number = agreed_number(like) if has_common_seed else None
    with nullcontext() if number is None else like.mics_random.drawing(number, is_whole=True):
        result = func(*whole_args, **whole_kwargs)
    wholes.keep_parts(written_by(func, args, kwargs))
    result = tree_map_only(torch.Tensor, lambda whole: _replicated(whole, like, origin), result)
    if is_view(func):
        gathered = like.mics_gathered or gathered_of(like) or GatheredBase(like, wholes.of(like), version_of(like))
        if like.mics_memory is not None:
            like.mics_memory.gathered = weakref.ref(gathered)
        for view in tensors_in(result):
            view.mics_gathered = gathered
    return result


def _run_with_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on this rank's plain tensors and gathered ones. Collective.

    The results are plain. `copy_` from a plain tensor gathers nothing.

    Raises:
        LifecycleError: A backward writes a gradient of this rank's into a tensor of all ranks.
    """
    if in_backward() and any(True for _ in written_by(func, args, kwargs)):
        raise LifecycleError(
            f"`{func._schema.name}` in a backward would mix gradients of this rank with a sharded tensor. In the "
            "loss, use `parameter.full_tensor()` instead of the parameter; write to a parameter after the backward."
        )
    if func is _aten.copy_.default and isinstance(args[0], ExactDTensor) and args[0].mics_gathered is None:
        keep_part(args[0], torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device).copy_(args[1]))
        return args[0]
    wholes = Wholes()
    whole_args, whole_kwargs = tree_map_only(DTensor, wholes.of, (args, kwargs))
    result = func(*whole_args, **whole_kwargs)
    wholes.keep_parts(written_by(func, args, kwargs))
    return result


def _fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: ExactDTensor, origin: str) -> Any:
    """Draw numbers into shards: equal ones on replicas, others on other shards. Collective."""
    local_args, local_kwargs = tree_map_only(DTensor, lambda tensor: tensor._local_tensor, (args, kwargs))
    number = agreed_number(like)
    with like.mics_random.drawing(number, is_whole=is_replicated(like)):
        drawn = func(*local_args, **local_kwargs)
    return as_exact(like_tensor(drawn, like), like.mics_random, f"{origin} by {number}")


def _replicated(whole: torch.Tensor, like: ExactDTensor, origin: str) -> torch.Tensor:
    """A tensor that is the same on all ranks; a sparse one stays plain."""
    if whole.layout is not torch.strided:
        return whole
    return as_exact(DTensor.from_local(whole, like.device_mesh, run_check=False), like.mics_random, origin)
