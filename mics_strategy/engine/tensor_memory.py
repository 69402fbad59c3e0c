"""Memory of the engine that tensors of a script share.

The engine keeps the memory of a parameter and of its gradient for as long as the model lives. A script expects what it
has of torch: that setting `data` or `grad` moves a tensor to other memory, so that aliases and views that it has kept
stay as they are. They get a copy at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias
from weakref import WeakValueDictionary, ref

import torch

from mics_strategy.comm.placement import compare_value, words_of
from mics_strategy.errors import LifecycleError

ExactDTensor: TypeAlias = Any  # whose module imports this one
_DIGEST_WIDTH = 8191  # words; a prime, so that rows of a matrix that change places change the digest


@dataclass(slots=True)
class WriteCount:
    """Number of writes to the parameters of one bucket, besides torch's counts."""

    num: int = 0


class AssignedTensor:
    """A tensor that a script has assigned, of which a parameter or gradient has a copy.

    With torch they would share memory from then on, so what is written to the tensor must not be lost without an error.

    Args:
        label: Name of the parameter or gradient, for errors.
        tensor: The tensor, whose memory is referenced weakly.
        numel: Elements of the whole parameter or gradient.

    Raises:
        LifecycleError: It is assigned to another parameter or gradient already. With torch the two would be tied.

    Cost: One read of the tensor, here and in each check.
    """

    _living: ClassVar[WeakValueDictionary[int, AssignedTensor]] = WeakValueDictionary()  # by address

    def __init__(self, label: str, tensor: torch.Tensor, numel: int) -> None:
        self._label = label
        self.numel = numel
        tied = self._living.get(tensor.data_ptr())
        if tied is not None and tied.is_kept and tensor.numel():  # tensors without elements share the address 0
            raise LifecycleError(
                f"{label} would share memory with {tied._label[0].lower()}{tied._label[1:]}, which was set to the same "
                "tensor. Assign a copy (`tensor.clone()`), or tie parameters before `shard()`."
            )
        self._living[tensor.data_ptr()] = self
        self._storage = ref(tensor.untyped_storage())
        self._dtype, self._place = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._digest = digest_of_places(tensor)

    @property
    def is_kept(self) -> bool:
        """Whether something still refers to the tensor, or to another one on its memory."""
        return self._storage() is not None

    def follow(self) -> None:
        """Take the present values of the tensor for those it had: what has a copy of them is overwritten."""
        tensor = self._tensor()
        if tensor is not None:
            self._digest = digest_of_places(tensor)

    def _tensor(self) -> torch.Tensor | None:
        storage = self._storage()
        if storage is None:
            return None
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._place)

    def check(self) -> None:
        """Raise if the tensor was written to.

        Raises:
            LifecycleError: It was.
        """
        tensor = self._tensor()
        if tensor is not None and not torch.equal(digest_of_places(tensor), self._digest):
            raise LifecycleError(
                f"{self._label} was set to a tensor (by `.data`, `.grad` or `vector_to_parameters`) to which something "
                "was written later. With torch it would share that memory; a sharded tensor has a copy of the values. "
                "Set it again after each write, or write into it (`parameter.data.copy_(values)`)."
            )


@dataclass(slots=True, eq=False)
class TensorMemory:
    """Memory of one parameter or gradient.

    Attributes:
        has_checks: Whether any memory of this process has `assigned` or `may_have_node`, or has had.
        writes: Count of writes to it, and to what else the engine counts with it.
        num_writes: Writes of a script's operations to it alone.
        finish: Ends pending reductions into a gradient (collective), or keeps late writes into a parameter.
        has_lost_graph: Whether the backward that filled it had `create_graph=True`: reductions are not differentiable.
        gathered: Returns the gathered values that views of it share, or None.
        shared: Living aliases and views, by id; not the engine's own tensor.
        plain: Living local parts that a script has, by id.
        assigned: Tensor whose values a script has assigned; None for none.
        may_have_node: Whether a script may have got the node in which autograd would accumulate the gradient.
    """

    has_checks: ClassVar[bool] = False
    writes: WriteCount = field(default_factory=WriteCount)
    num_writes: int = 0
    finish: Callable[[], None] | None = None
    has_lost_graph: bool = False
    gathered: Callable[[], Any] = lambda: None
    shared: WeakValueDictionary[int, ExactDTensor] = field(default_factory=WeakValueDictionary)
    plain: WeakValueDictionary[int, torch.Tensor] = field(default_factory=WeakValueDictionary)
    assigned: AssignedTensor | None = None
    may_have_node: bool = False

    def before_read(self) -> None:
        """End pending reductions. Collective if there are any.

        Raises:
            LifecycleError: The result would be taken for a constant in a loss, where torch differentiates a gradient;
                or an assigned tensor was written to.
        """
        if self.assigned is not None:
            self.assigned.check()
        if self.finish is not None:
            self.finish()
        if self.has_lost_graph and torch.is_grad_enabled():
            raise LifecycleError(
                "A gradient of `backward(create_graph=True)` is the mean over ranks, which cannot be differentiated "
                "again. For a loss of gradients, take those of whole parameters: `w = parameter.full_tensor()`, "
                "`torch.func.functional_call(model, {name: w}, inputs)`, `torch.autograd.grad(loss, w, "
                "create_graph=True)`. To look at it, use `torch.no_grad()` or `parameter.grad.detach()`."
            )

    def count_write(self) -> None:
        """Count a write of a script's operation."""
        self.writes.num += 1
        self.num_writes += 1

    def check_assigned(self) -> None:
        """See `AssignedTensor.check`."""
        if self.assigned is not None:
            self.assigned.check()

    def watch(self, label: str, tensor: torch.Tensor, numel: int) -> None:
        """Note a tensor whose values were assigned; see `AssignedTensor`.

        Raises:
            LifecycleError: It is assigned to another parameter or gradient already.
        """
        self.assigned = None
        self.assigned = AssignedTensor(label, tensor, numel)
        TensorMemory.has_checks = True

    def add(self, tensor: ExactDTensor) -> None:
        """Note an alias or view."""
        tensor.mics_memory = self
        self.shared[id(tensor)] = tensor

    def lend(self, local: torch.Tensor) -> torch.Tensor:
        """An alias of a local part, which keeps its values when this memory gets others."""
        alias = local.view_as(local)
        self.plain[id(alias)] = alias
        return alias

    def give(self, tensor: ExactDTensor, own: ExactDTensor) -> None:
        """Let a tensor be an alias of the engine's own one, without its values.

        Args:
            tensor: Tensor of the same shape and placements.
            own: The engine's tensor.
        """
        tensor._local_tensor = own._local_tensor.detach()
        self.add(tensor)

    def leave(self) -> None:
        """Move all aliases and views to a copy, which they share."""
        self.assigned = None
        tensors, plain = list(self.shared.values()), list(self.plain.values())
        self.shared.clear()
        self.plain.clear()
        copies: dict[int, torch.UntypedStorage] = {}  # by address: a script may have a part of earlier memory

        def moved(local: torch.Tensor) -> torch.Tensor:
            storage = local.untyped_storage()
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = storage.clone()
            copied = copies[storage.data_ptr()]
            return local.new_empty(0).set_(copied, local.storage_offset(), local.shape, local.stride())

        for local in plain:
            local.data = moved(local)
        for tensor in tensors:
            tensor.mics_memory = None
            tensor._local_tensor = moved(tensor._local_tensor)


def check_not_kept(gradient: torch.Tensor, name: str) -> None:
    """Check that a gradient can be added to.

    Args:
        gradient: Gradient that a script has set.
        name: Name of its parameter.

    Raises:
        LifecycleError: It is a copy of a tensor that still exists, to which autograd would add.
    """
    memory: TensorMemory | None = getattr(gradient, "mics_memory", None)
    if memory is not None and memory.assigned is not None and memory.assigned.is_kept:
        raise LifecycleError(
            f"A backward has added to the gradient of `{name}`, which a script has set to a tensor that it still has. "
            "With torch that tensor would be added to; a sharded gradient has a copy of the values. Set it to a copy "
            "(`parameter.grad = tensor.clone()`), and read `parameter.grad` after the backward."
        )


_aten = torch.ops.aten
_OVERWRITES = frozenset(
    (
        *(_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor),
        *(_aten.normal_.default, _aten.uniform_.default, _aten._foreach_zero_.default, _aten._foreach_copy_.default),
    )
)


def follow_overwritten(func: Any, args: tuple[Any, ...]) -> None:
    """Forgive writes to assigned tensors where an operation overwrites the whole parameter or gradient.

    Args:
        func: Operation that is about to run.
        args: Its arguments; it overwrites the first one, a tensor or a list of them.
    """
    if TensorMemory.has_checks and func in _OVERWRITES:
        for tensor in args[0] if isinstance(args[0], list) else args[:1]:
            memory: TensorMemory | None = getattr(tensor, "mics_memory", None)
            if memory is not None and memory.assigned is not None and memory.assigned.numel == tensor.numel():
                memory.assigned.follow()


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Count writes that the engine made to the parts of tensors, so that kept views of their rows show them."""
    for tensor in tensors:
        memory = getattr(tensor, "mics_memory", None)
        if memory is not None:
            memory.writes.num += 1


def digest_of_places(values: torch.Tensor) -> torch.Tensor:
    """A weighted sum of a tensor's words, an int64 scalar on its device.

    It changes when a few elements change, or change places.
    """
    words = words_of(values)
    weights = torch.arange(1, 2 * _DIGEST_WIDTH, 2, device=words.device)
    num_rows, rest = divmod(len(words), _DIGEST_WIDTH)
    columns = words[rest:].view(num_rows, _DIGEST_WIDTH).sum(0, dtype=torch.int64)
    return (columns * weights).sum() + (words[:rest] * weights[:rest]).sum()


def compare_values(plain: list[torch.Tensor], like: ExactDTensor, origin: str) -> None:
    """Let the next step compare plain tensors that become part of shards. See `comm.placement.compare_value`."""
    for tensor in plain:
        if tensor.layout is torch.strided:
            compare_value(digest_of_places(tensor), like.device, origin)
