"""What autograd may do after a unit was resharded, and what it must refuse.

Autograd's graph saves unsharded parameters. Units share slots, so the memory of a saved parameter may hold another
unit's values when a backward reads it. Three parts:

- `SavedVersions` makes autograd refuse such a parameter, and one with other values; `storage_guard` refuses it to
  everybody else. Autograd saves version counters and compares them when it reads. The counter of a parameter is at a
  number of its own while its unit is resharded, and at the saved number while it is unsharded with the same values.
- `DoubleBackward` unshards units for a second backward. The first backward (`create_graph=True`) runs the nodes of the
  forward and makes new ones; both kinds read parameters in the second backward, in autograd's own order. So each node
  that the forward of a unit has made gets hooks when the first backward is about to run it: the unit is unsharded
  before that node, and before each node that it makes. Sequence numbers tell which forward has made a node.
- `wrap_autograd` translates the `inputs` of `torch.autograd.backward` and `grad` from sharded to unsharded parameters,
  and the errors of both. Without it ``loss.backward(inputs=list(model.parameters()))`` computes nothing and raises
  nothing. It wraps the function that both call, so a script may have imported them by name before. It is installed
  once, with the first sharded model, and does not change other calls.
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import nn
from torch._guards import CompileContext
from torch.autograd.graph import Node
from typing_extensions import override

from mics_strategy.comm.placement import have_equal_values
from mics_strategy.engine.exact_dtensor import ExactDTensor
from mics_strategy.engine.parameter import ProxyParameter, ShardedParameter, fast_attributes
from mics_strategy.engine.storage_guard import explain_refusal
from mics_strategy.errors import LifecycleError

_RESHARDED = 2**31  # above every count of writes; torch's counters have 32 bits
_set_versions = torch._C._autograd._unsafe_set_version_counter
_numbers = itertools.count(_RESHARDED)
_VERSION = attrgetter("_version")
_owners: weakref.WeakValueDictionary[int, SavedVersions] = weakref.WeakValueDictionary()


class UnshardedParameter(ProxyParameter):
    """A parameter as a forward uses it, with a count of all writes.

    Attributes:
        raw_grad: Autograd's own slot, which is empty but for the moment in which the engine takes a gradient.
    """

    raw_grad = torch.Tensor.grad  # the descriptor under the property below

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the sharded parameter, for scripts that reach it through the module of a running forward."""
        sharded = self._sharded()
        return None if sharded is None else sharded.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        sharded = self._sharded()
        if sharded is not None:
            sharded.grad = value

    def _sharded(self) -> ShardedParameter | None:
        if CompileContext.try_get() is not None:  # torch looks at the gradients of inputs; code has none
            return None
        sharded = self.mics_link.sharded(self.mics_position)
        if sharded is not None and torch._C._current_graph_task_id() != -1:
            raise LifecycleError(
                f"The gradient of `{sharded.mics_name}` was read or set in a backward, before ranks have reduced it. "
                "Do it after the backward, or, in a forward, take this rank's by `module.weight.register_hook`."
            )
        return sharded

    @property
    def data(self) -> torch.Tensor:
        """An alias with the same version counter, which counts writes through it."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise LifecycleError(
                f"A forward gave a parameter of shape {tuple(self.shape)} and {self.dtype} new `.data` of shape "
                f"{tuple(value.shape)} and {value.dtype}, for which there is no memory. Change the model before "
                "`shard()`; to change values, write into the parameter."
            )
        with torch.no_grad():
            self.copy_(value)

    @override
    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        """Freeze or unfreeze the parameter in both of its forms."""
        sharded = self.mics_link.sharded(self.mics_position)
        if sharded is not None and sharded.requires_grad != requires_grad:
            sharded.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    @override
    def register_post_accumulate_grad_hook(self, hook: object) -> NoReturn:
        """Refuse: the engine takes each gradient away before such a hook sees it."""
        raise LifecycleError(
            "A hook of `register_post_accumulate_grad_hook` in a forward would see no gradient. Read `parameter.grad` "
            "after the backward, or take the gradient of this use with `parameter.register_hook`."
        )


class SavedVersions:
    """The version counters of one bucket's unsharded parameters.

    Args:
        unit: Name of the unit, for errors.
        parameters: The unsharded parameters. Each shares its counter only with its own views.
    """

    def __init__(self, unit: str, parameters: Sequence[nn.Parameter]) -> None:
        self.unit = unit
        self._parameters = tuple(parameters)
        self._valid = (0,) * len(self._parameters)
        self._content: int | None = None
        number = next(_numbers)
        self._resharded = (number,) * len(self._parameters)
        _owners[number] = self

    def unshard(self, content: int) -> None:
        """Set the counters for parameters that hold values again.

        Graphs with other saved values stay invalid.

        Args:
            content: Version of the bucket with these values.
        """
        if content != self._content:
            self._content = content
            self._valid = (max(self._valid, default=0) + 1,) * len(self._parameters)
        _set_versions(self._parameters, self._valid)

    def reshard(self) -> None:
        """Set the counters for parameters whose memory is about to be overwritten."""
        _set_versions(self._parameters, self._resharded)

    def written(self) -> list[int]:
        """Positions of the parameters that were written to since `unshard`; none where they are resharded."""
        versions = self._versions()
        if versions in (self._valid, self._resharded):
            return []
        return [i for i, valid in enumerate(self._valid) if versions[i] != valid]

    def accept_writes(self, content: int) -> None:
        """Accept written values as those of the bucket at its version `content`."""
        self._valid = self._versions()
        self._content = content

    def _versions(self) -> tuple[int, ...]:
        with fast_attributes():
            return tuple(map(_VERSION, self._parameters))


def _explain_resharded(error: RuntimeError) -> str | None:
    """What to do about autograd's refusal of resharded parameters; else None."""
    match = re.search(r"is at version (\d+); expected version", str(error))
    owner = _owners.get(int(match[1])) if match else None
    if owner is None:
        return None
    return (
        f"A backward needed the parameters of unit `{owner.unit}` when they were not unsharded. Either it has entered "
        "the unit other than through the tensors that the unit's forward had returned (through one that a hook or an "
        "attribute kept), or several units are recomputed together, or a second derivative goes through several units "
        "(`create_graph=True`, `torch.func`), or compiled autograd runs it. Return that tensor from the unit's "
        "forward, name the class of the inner module that returns it in `shard(units=...)`, keep the model's output "
        "in the loss (`+ 0 * output.sum()`), checkpoint one unit at a time, or keep parameters unsharded with "
        "`params='replicate'`. Switch compiled autograd off."
    )


class HasNodes(Protocol):
    """A forward, for the nodes that it adds to autograd's graph."""

    def has_added(self, node: Node) -> bool:
        """Whether this forward, or a later one, added a node."""


ForwardT = TypeVar("ForwardT", bound=HasNodes)


class DoubleBackward(Generic[ForwardT]):
    """Hooks on the nodes of a backward with `create_graph=True`.

    Cost: A walk over the graph in Python.

    Args:
        before_node: Called before a node of a forward runs, in this backward and in later ones.
        before_made_node: Called before a node runs that this backward makes.
    """

    def __init__(self, before_node: Callable[[ForwardT], None], before_made_node: Callable[[ForwardT], None]) -> None:
        self._before_node = before_node
        self._before_made_node = before_made_node
        self._hooked: set[tuple[ForwardT, Node]] = set()

    def follow(self, call: ForwardT, entry: Node) -> None:
        """Register hooks on the nodes of the forward `call` to which `entry` leads."""
        pending = [entry]
        while pending:
            node = pending.pop()
            following = [other for other, _ in node.next_functions if other is not None]
            is_leaf = not node.next_functions
            if is_leaf or not call.has_added(node) or (call, node) in self._hooked:
                continue
            self._hooked.add((call, node))
            node.register_prehook(lambda _: self._before_node(call))
            node.register_hook(lambda grad_inputs, _: self._follow_made(call, grad_inputs))
            pending += following

    def _follow_made(self, call: ForwardT, grads: tuple[Any, ...]) -> None:
        for grad in grads:
            node = None if grad is None else grad.grad_fn
            if node is not None and (call, node) not in self._hooked:
                self._hooked.add((call, node))
                node.register_prehook(lambda _: self._before_made_node(call))

    def end(self) -> None:
        """Release the nodes of a backward that has ended."""
        self._hooked.clear()


Function = Callable[..., Any]


def wrap_autograd() -> None:
    """Wrap autograd's entry of `torch.autograd.backward` and `grad`, once."""
    autograd: Any = torch.autograd  # both functions look the entry up here when they are called
    if not hasattr(autograd._engine_run_backward, "mics_wraps"):
        autograd._engine_run_backward = _wrapped(autograd._engine_run_backward)


def _wrapped(original: Function) -> Function:
    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **options: Any) -> Any:
        check_losses(outputs)
        gradients, retain_graph, create_graph, inputs, *others = args
        tensors = [getattr(getattr(each, "node", None), "variable", each) for each in inputs]  # those of edges, too
        sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedParameter)]
        accumulates = options.get("accumulate_grad", False)
        in_graph = (*inputs, *_in_graph(sharded)) if accumulates else inputs
        try:
            results = original(outputs, gradients, retain_graph, create_graph, in_graph, *others, **options)
        except RuntimeError as error:
            if sharded and not accumulates and "appears to not have been used in the graph" in str(error):
                raise _no_local_gradient(sharded[0]) from error
            explanation = _explain_resharded(error) or explain_refusal(error)
            if explanation is None:
                raise
            raise LifecycleError(explanation) from error
        for tensor, grad in zip(tensors, () if accumulates else results, strict=False):
            if grad is None and isinstance(tensor, ShardedParameter):
                raise _no_local_gradient(tensor)
        return results

    run_backward.mics_wraps = original  # type: ignore[attr-defined]
    return run_backward


def check_losses(outputs: Iterable[torch.Tensor]) -> None:
    """Check losses of sharded tensors alone, where a backward begins. Collective if there are any.

    Raises:
        LifecycleError: Ranks have other losses, of which no mean would be taken.
    """
    for output in outputs:
        if isinstance(output, ExactDTensor) and output.dim() == 0 and not have_equal_values(output):
            raise LifecycleError(
                "This loss of sharded tensors alone differs between ranks, perhaps by a factor, and no mean of its "
                "gradients is taken. Make the factor a tensor (`torch.tensor(factor)`), or compute the loss of "
                "`parameter.full_tensor()`."
            )


def _in_graph(sharded: Iterable[ShardedParameter]) -> list[torch.Tensor]:
    """The unsharded parameters of sharded ones. Forwards use the unsharded ones."""
    unsharded = [parameter.mics_link.unsharded(parameter.mics_position) for parameter in sharded]
    return [parameter for parameter in unsharded if parameter is not None]


def _no_local_gradient(parameter: ShardedParameter) -> LifecycleError:
    return LifecycleError(
        f"`torch.autograd.grad` was asked for the gradient of the sharded parameter `{parameter.mics_name}`, which no "
        "rank has whole. Call `backward()`, on every rank, and read `parameter.grad`."
    )


def check_not_traced() -> None:
    """Raise while torch traces or exports a sharded model, or runs it without values (`FakeTensorMode`)."""
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if is_fake or torch._C._is_tracing() or torch.compiler.is_exporting():
        refuse_conversion()


def refuse_conversion() -> NoReturn:
    """Raise the error of a conversion.

    Raises:
        LifecycleError: Always.
    """
    raise LifecycleError(
        "A sharded model cannot be traced, scripted or exported (`torch.jit`, `torch.export`, ONNX), because each rank "
        "has only its shards. Build the plain model, load `sharded.full_state_dict()` into it, and convert that one."
    )
