"""Description of any module, from a trace on the meta device.

The real module runs on tensors without memory. Operations are counted as torch's own counters do, and what autograd
saves is added up by the unit whose forward saved it, each memory once.

Two batches are traced, and one sample is their difference. So what does not grow with the batch counts nothing: rotary
tables, statistics of BatchNorm, gradients of parameters.

Attention by `torch.nn.functional.scaled_dot_product_attention` counts as a fused kernel, whatever its mask: it saves
its inputs, its output and the logarithm of each row's sum. With `is_causal`, half of its scores are computed. Dropout
saves a mask of one byte for each element, as on CUDA.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from mics_strategy.engine.units import UnitRule, UnitSpec, find_units
from mics_strategy.errors import ConfigError
from mics_strategy.planner.model import FusedAttention, ModelDescription, ParameterShape, UnitModel, attention_speed

Loss = Callable[[Any], torch.Tensor]

_BATCHES = (1024, 1025)  # large, so that the peak of the smaller one is already that of activations
_OUTSIDE = 0  # the root's index
_ATTENTION = nn.functional.scaled_dot_product_attention
_DROPOUTS = (nn.functional.dropout, torch.dropout)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInput:
    """What is traced.

    Attributes:
        name: Name of the description.
        example: Keyword arguments of the forward for one sample: tensors [1, ...], of which those that require a
            gradient get one, and other values.
        tokens_per_sample: Tokens of a sequence; 1 for an image.
        units: Modules that form units, as for `shard`.
        loss: Loss of the forward's output; by default, that of `token_loss`.
    """

    name: str
    example: Mapping[str, Any]
    tokens_per_sample: int = 1
    units: UnitRule = "auto"
    loss: Loss | None = None


def token_loss(output: Any) -> torch.Tensor:
    """Cross-entropy in fp32, as transformers compute it. The output has logits [..., C], or is logits itself."""
    logits = logits_of(output)
    rows = logits.float().flatten(0, -2)
    labels = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    return nn.functional.cross_entropy(rows, labels)


def logits_of(output: Any) -> torch.Tensor:
    """The logits in an output.

    Raises:
        ConfigError: It has none.
    """
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.dim() < 2:
        raise ConfigError(
            f"The forward returned {type(output).__name__}, which has no `logits` [..., classes]. Pass `loss`, a "
            "function of that output."
        )
    return logits


def trace_model(model: nn.Module, traced: TraceInput) -> ModelDescription:
    """Describe a module on the meta device. It can be used afterwards.

    Args:
        model: Module in the dtype of the computation, in training mode or not.
        traced: Example, units and loss.

    Cost:
        The time of two forwards and backwards without arithmetic; no memory.

    Raises:
        ConfigError: The module has values, or its forward does not take the example's batches.
    """
    if any(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ConfigError(
            f"`{type(model).__name__}` has values, and a trace would compute with them. Build it under "
            "`torch.device('meta')`."
        )
    specs = find_units(model, traced.units)
    small, large = (_trace(model, specs, traced, num_samples) for num_samples in _BATCHES)
    costs = [after.minus(before) for before, after in zip(small, large, strict=True)]
    names, layers = _kinds(specs, costs), _layers(specs)
    dtypes = [p.dtype for p in model.parameters() if p.dtype.is_floating_point]
    units = tuple(
        UnitModel(
            name=spec.name,
            kind=kind,
            parameters=tuple(
                ParameterShape(name=e.name, shape=tuple(e.parameter.shape), is_trained=e.parameter.requires_grad)
                for e in spec.parameters
            ),
            forward_flop=float(cost.flop),
            attention_flop=float(cost.attention_flop),
            attention=FusedAttention(
                cost.attention_bytes,
                float(cost.attention_inputs_flop),
                (cost.attention_flop or 1) / (cost.attention_cost or 1),
            ),
            saved_bytes=cost.saved_bytes,
            input_bytes=cost.input_bytes,
            working_bytes=max(0, cost.working_bytes),
            freed_bytes=cost.freed_bytes,
            depth=spec.depth,
            is_layer=index in layers,
            has_backward=small[index].num_in_graph > 0,
        )
        for index, (spec, cost, kind) in enumerate(zip(specs, costs, names, strict=True))
    )
    return ModelDescription(
        name=traced.name,
        units=units,
        tokens_per_sample=traced.tokens_per_sample,
        model_flop_per_sample=sum(unit.model_flop for unit in units),
        activation_dtype_bytes=min((dtype.itemsize for dtype in dtypes), default=4),
    )


@dataclass(slots=True)
class _Cost:
    """What one unit cost in one trace."""

    flop: int = 0
    attention_flop: int = 0
    attention_cost: int = 0  # FLOP over the share of the best speed
    attention_bytes: int = 0
    attention_inputs_flop: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    working_bytes: int = 0
    freed_bytes: int = 0
    num_in_graph: int = 0  # tensors that autograd saved, and outputs that require a gradient; of no batch's size

    def minus(self, other: _Cost) -> _Cost:
        names = [entry.name for entry in dataclasses.fields(self)]
        return _Cost(**{name: getattr(self, name) - getattr(other, name) for name in names})


def _layers(specs: list[UnitSpec]) -> set[int]:
    """Indices of the units whose class occurs several times."""
    classes = [type(spec.module) for spec in specs]
    return {index for index, cls in enumerate(classes) if index and classes.count(cls) > 1}


def _kinds(specs: list[UnitSpec], costs: list[_Cost]) -> list[str]:
    """Kinds of the units: the root, and classes with equal parameters and costs."""
    seen: dict[Any, str] = {}
    numbers: collections.Counter[str] = collections.Counter()
    kinds = []
    for index, (spec, cost) in enumerate(zip(specs, costs, strict=True)):
        shapes = tuple((tuple(e.parameter.shape), e.parameter.requires_grad) for e in spec.parameters)
        name = type(spec.module).__name__ if index else "root"
        key = (name, shapes, cost.flop, cost.saved_bytes, cost.input_bytes)
        if key not in seen:
            numbers[name] += 1
            seen[key] = name if numbers[name] == 1 else f"{name}-{numbers[name]}"
        kinds.append(seen[key])
    largest: dict[str, int] = {}
    for kind, cost in zip(kinds, costs, strict=True):  # the first and the last of a row have other neighbours
        largest[kind] = max(largest.get(kind, 0), cost.working_bytes)
    for kind, cost in zip(kinds, costs, strict=True):
        cost.working_bytes = largest[kind]
    return kinds


def _trace(model: nn.Module, specs: list[UnitSpec], traced: TraceInput, num_samples: int) -> list[_Cost]:
    """Costs of every unit for a batch of `num_samples`."""
    batch = tree_map(lambda value: _batched(value, num_samples), dict(traced.example))
    recorder = _Recorder([_Cost() for _ in specs], _storages(model), _layers(specs))
    with recorder.units(specs), _FusedKernels(recorder), recorder:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
            try:
                output = model(**batch)
            except (RuntimeError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"`{type(model).__name__}` does not take the example on the meta device: {error}. Pass keyword "
                    "arguments of its forward whose tensors are [1, ...]."
                ) from error
            recorder.keep_output(output)
            loss = (traced.loss or token_loss)(output)
        recorder.is_backward = True
        if loss.requires_grad:
            loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return recorder.costs


def _batched(value: Any, num_samples: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.dim() or value.shape[0] != 1:
        raise ConfigError(
            f"An example tensor has the shape {list(value.shape)}. Pass one sample, [1, ...]: the first dimension is "
            "that of the batch."
        )
    return value.new_empty((num_samples, *value.shape[1:]), device="meta", requires_grad=value.requires_grad)


def _storages(model: nn.Module) -> set[int]:
    """Storages of parameters and buffers, by address."""
    return {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}


@dataclass(slots=True)
class _Memory:
    """Bytes of storages that exist, and of those that wait for the backward.

    Attributes:
        live_bytes: Bytes of all storages that the trace has made and that still exist.
        saved_bytes: Bytes of those of them that autograd keeps.
        sizes: Bytes of each existing storage, by address.
        saved: Addresses of those that autograd keeps.
    """

    live_bytes: int = 0
    saved_bytes: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.sizes:
            self.sizes[address] = storage.nbytes()
            self.live_bytes += self.sizes[address]
            weakref.finalize(storage, self._remove, address)

    def _remove(self, address: int) -> None:
        num_bytes = self.sizes.pop(address)
        self.live_bytes -= num_bytes
        if address in self.saved:
            self.saved.remove(address)
            self.saved_bytes -= num_bytes

    def save(self, tensor: torch.Tensor) -> int:
        """Note that autograd keeps the storage of a tensor.

        Returns its bytes, 0 for one that is kept already.
        """
        self.add(tensor)
        address = tensor.untyped_storage()._cdata
        if address in self.saved:
            return 0
        self.saved.add(address)
        self.saved_bytes += self.sizes[address]
        return self.sizes[address]


class _Recorder(TorchDispatchMode):
    """Records operations and memory, by the unit whose module runs.

    In the backward the unit is the one whose saved tensor was read last.
    """

    def __init__(self, costs: list[_Cost], states: set[int], layers: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs = costs
        self.is_backward = False
        self._layers = layers  # indices of units
        self._is_behind_layers = False
        self._states = states  # storages of parameters and buffers
        self._memory = _Memory()
        self._running = [_OUTSIDE]
        self._makers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._unit = _OUTSIDE  # of the backward
        self._kept_bytes: dict[int, int] = {}  # saved when a unit's backward began

    @contextmanager
    def units(self, specs: list[UnitSpec]) -> Iterator[None]:
        """Follow the forwards of the units' modules."""
        handles = []
        for index, spec in enumerate(specs):
            enter, leave = self._hooks(index)
            handles.append(spec.module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            handles.append(spec.module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, index: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(index)
            tensors = {t.untyped_storage()._cdata: t for t in tree_leaves((args, kwargs)) if _is_input(t)}
            self.costs[index].input_bytes += sum(t.numel() * t.itemsize for t in tensors.values())

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()
            self._is_behind_layers |= index in self._layers
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor):
                    self._makers.setdefault(tensor.untyped_storage(), index)  # the innermost unit
                    self.costs[index].num_in_graph += tensor.requires_grad

        return enter, leave

    def keep_output(self, output: Any) -> None:
        """Count the model's output, which exists until the step ends.

        It belongs to the unit that made it, and so does the loss.
        """
        fields = vars(output).values() if hasattr(output, "logits") else ()
        for tensor in (t for t in (*tree_leaves(output), *fields) if isinstance(t, torch.Tensor)):
            unit = self._makers.get(tensor.untyped_storage(), _OUTSIDE)
            self.costs[unit].saved_bytes += self._memory.save(tensor)
            self._running[_OUTSIDE] = unit

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Count a tensor that autograd saves."""
        unit = self._running[-1]
        self.costs[unit].num_in_graph += 1
        if tensor.untyped_storage()._cdata not in self._states:
            num_bytes = self._memory.save(tensor)
            self.costs[unit].saved_bytes += num_bytes
            self.costs[unit].freed_bytes += num_bytes if self._is_behind_layers and unit not in self._layers else 0
        return tensor, unit

    def unpack(self, packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        """Return a saved tensor to the backward of its unit."""
        tensor, self._unit = packed
        if self.is_backward:
            self._kept_bytes.setdefault(self._unit, self._memory.saved_bytes)
        return tensor

    def count(self, flop: float) -> None:
        """Count FLOP of the forward that runs."""
        if not self.is_backward:
            self.costs[self._running[-1]].flop += round(flop)

    def count_attention(self, flop: float, share: float, num_bytes: int) -> None:
        """Count FLOP of fused attention at a share of its best speed, and the bytes that it saves."""
        if not self.is_backward:
            cost = self.costs[self._running[-1]]
            cost.attention_inputs_flop = cost.flop - cost.attention_flop
            cost.attention_flop += round(flop)
            cost.attention_cost += round(flop / share)
            cost.attention_bytes += num_bytes
        self.count(flop)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.count(formula(*args, **kwargs, out_val=out))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._states:
                self._memory.add(tensor)
        if self.is_backward and self._unit in self._kept_bytes:
            cost = self.costs[self._unit]
            cost.working_bytes = max(cost.working_bytes, self._memory.live_bytes - self._kept_bytes[self._unit])
        return out


def _is_input(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


class _FusedKernels(TorchFunctionMode):
    """Replaces attention and dropout by what a GPU's fused kernels save."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return self._attend(*args, **kwargs)
        if func in _DROPOUTS:
            return _drop(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *masks: Any,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Attention [..., heads, length, head size] whose scores are never stored."""
        is_causal = is_causal or (len(masks) > 2 and bool(masks[2]))  # after the mask and the dropout
        rows, width = query.shape[:-1].numel(), query.shape[-1] + value.shape[-1]
        flop = 2 * rows * key.shape[-2] * width / (2 if is_causal else 1)
        num_bytes = query.itemsize * (rows * width + key.numel() + value.numel()) + 4 * rows
        self._recorder.count_attention(flop, attention_speed(key.shape[-2], query.shape[-1]), num_bytes)
        out: torch.Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
        return out


def _drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout that saves a mask of bool; the names are torch's."""
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


class _Attention(torch.autograd.Function):
    """Attention without arithmetic that saves what a fused kernel saves.

    Source:
        FlashAttention-2 (arXiv:2307.08691), section 3.1: the backward reads query, key, value, output and the
        logarithms of the rows' sums, and writes three gradients.
    """

    @staticmethod
    @override
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # As fused kernels do: [..., length, heads, head size] in memory, so that joining the heads copies nothing.
        out = query.new_empty(*query.shape[:-3], query.shape[-2], query.shape[-3], value.shape[-1]).transpose(-2, -3)
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, row_sums)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
