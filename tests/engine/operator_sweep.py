"""Every operation of torch's own list of operators, on sharded parameters and gradients, beside plain tensors.

The samples are those with which torch tests its operators (`op_db`). One model holds all of them as parameters.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from mics_strategy import MiCSError, ShardConfig, shard
from tests.rank_report import RankContext
from tests.seeds import seed_generators

_MOST_ROWS = 100
_NOT_OF_VALUES = frozenset(  # of memory, devices and autograd
    """backward const_data_ptr cuda data_ptr detach_ is_set_to is_shared module_load record_stream register_hook
    register_post_accumulate_grad_hook reinforce requires_grad_ retain_grad set_ share_memory_ slice_inverse storage
    storage_type to_mkldnn untyped_storage""".split()
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of an operator.

    Attributes:
        name: Name of the operator.
        call: The operator, or the variant that writes into its first argument.
        values: First argument, in fp64.
        args: The others, positional ones and keywords.
    """

    name: str
    call: Callable[..., Any]
    values: Tensor
    args: tuple[tuple[Any, ...], dict[str, Any]]

    def on(self, tensor: Tensor) -> Any:
        """The result on a tensor of these values, which may be written to."""
        args, kwargs = tree_map_only(Tensor, lambda value: value.detach().clone(), self.args)
        return self.call(tensor, *args, **kwargs)


@dataclass(slots=True)
class Found:
    """What a sweep has found: how many samples are right, which are refused by whom, which are wrong."""

    num_right: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of deprecated operators and of what torch's own tests import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def samples(every: int, *, in_place: bool, differentiable: bool, form: str) -> list[Sample]:
    """A sample of every so many-th operator with one in fp64 that draws no random numbers.

    Args:
        every: Distance of the operators in torch's list.
        in_place: Whether to add the variants that write to their first argument.
        differentiable: Whether to leave out operators without a gradient.
        form: ``"first"``: the first sample; ``"second"``: the second one with several rows; ``"row"``: the first row of
            the first one, where the operator takes it, of which most ranks have nothing; ``"view"``: the first one with
            several rows, to be rows of a tensor with one more; ``"methods"``: every so many-th method of a tensor, with
            different arguments on one shape.
    """
    if form == "methods":
        return [sample for sample in _methods(every) if _is_deterministic(sample)]
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds, so only where needed

    chosen = []
    for op in op_db[::every]:
        if torch.float64 not in op.supported_dtypes("cpu") or (differentiable and not op.supports_autograd):
            continue
        if "empty" in op.name or op.name.startswith("unsafe_"):
            continue  # no values to compare; views that torch tells not to write to
        for sample in _of_form(_dense_samples(op), form):
            args = (tuple(sample.args), dict(sample.kwargs))
            calls = {op.name: op.op, f"{op.name}_": op.inplace_variant if in_place else None}
            values = sample.input.detach()
            if form == "row" and (not values.dim() or values.shape[0] == 1 or op.name == "_segment_reduce"):
                continue  # the last one reads behind the end of a row, as its lengths ask for
            values = values[:1] if form == "row" else values
            made = [Sample(name, call, values, args) for name, call in calls.items() if call is not None]
            chosen += [one for one in made if _is_deterministic(one)]
    return chosen


def _methods(every: int) -> Iterator[Sample]:
    """Methods with arguments that may fit a matrix. A rule that DTensor keeps for one call must not hold for others."""
    values, other = torch.rand(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    of_one: list[tuple[Any, ...]] = [(), (2,), (1,), (0,), (-1,), (0.5,), (other,), (torch.float32,)]
    of_more: list[tuple[Any, ...]] = [
        (1, 0),
        (0, 1),
        (2, 1),
        (2, 0),
        (1, 0, 2),
        (0, 1, 3),
        ([4, 6],),
        (other > 0.5, 3.0),
    ]
    arguments = [*of_one, *of_more, (0, torch.tensor([0, 5])), (1, torch.tensor([0, 3])), (other, lambda a, b: a + b)]
    for name in [name for name in dir(Tensor) if not name.startswith("_") and callable(getattr(Tensor, name))][::every]:
        if name not in _NOT_OF_VALUES and not name.startswith(("new", "unsafe_")):  # not initialized; no safe views
            yield from (Sample(name, partial(_call_method, name), values, (args, {})) for args in arguments)


def _call_method(name: str, tensor: Tensor, *args: Any) -> Any:
    return getattr(tensor, name)(*args)  # as a class may have it


def _of_form(dense: Iterator[Any], form: str) -> list[Any]:
    if form in ("second", "view"):
        tall = (sample for sample in dense if sample.input.dim() and 1 < sample.input.shape[0] <= _MOST_ROWS)
        first = form == "second"  # the first one of these is left out
        return [*islice(tall, first, first + 1)]
    return [*islice(dense, 1)]


def _dense_samples(op: Any) -> Iterator[Any]:
    seed_generators(0)  # on every rank
    for sample in op.sample_inputs_func(op, "cpu", torch.float64, False):  # `sample_inputs` reads the stack for each
        values = sample.input
        if isinstance(values, Tensor) and values.layout is torch.strided and values.dtype == torch.float64:
            if values.numel():
                yield sample


class _Draws(TorchDispatchMode):
    """Notes whether an operation draws random numbers."""

    has_drawn = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _is_deterministic(sample: Sample) -> bool:
    try:
        with _Draws() as draws:
            sample.on(sample.values.clone())
    except (RuntimeError, AssertionError, ValueError, LookupError, TypeError, AttributeError):
        return False  # other arguments, in place, on a shape that does not hold the result, or for GPUs alone
    return not draws.has_drawn


def _equal(one: Any, other: Any) -> bool:
    """Whether two results are close: shapes, dtypes and values, and scalars as a script reads them."""
    leaves = [tree_leaves(result) for result in (one, other)]
    if len(leaves[0]) != len(leaves[1]):
        return False
    for left, right in zip(*leaves, strict=True):
        if isinstance(left, Tensor) != isinstance(right, Tensor):
            return False
        if not isinstance(left, Tensor):
            if left != right and left == left:
                return False
            continue
        if left.dim() == 0 and not left.is_complex() and left.item() != left.item() and right.item() == right.item():
            return False
        found = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in (left, right)]
        if found[0].shape != found[1].shape or found[0].dtype != found[1].dtype:
            return False
        try:
            torch.testing.assert_close(*(leaf.detach() for leaf in found), equal_nan=True, rtol=1e-7, atol=1e-9)
        except AssertionError:
            return False
        if left.dim() == 0 and abs(complex(left.item()) - complex(found[1].item())) > 1e-7 * abs(found[1].item()):
            return False
    return True


class Holder(nn.Module):
    """A model whose parameters are the samples' values, or hold them behind another row."""

    def __init__(self, chosen: list[Sample], form: str) -> None:
        super().__init__()
        self.held = nn.ParameterList([nn.Parameter(_base(sample, form)) for sample in chosen])

    def forward(self, x: Tensor) -> Tensor:
        return x


@_quiet()
def sweep_values(ctx: RankContext, preset: str, every: int, form: str) -> Found:
    """Each operator on a parameter, and on its gradient; a result that is a view is written to."""
    chosen = samples(every, in_place=True, differentiable=False, form=form)
    model = Holder(chosen, form)
    shard(model, ShardConfig.preset(preset))
    found = Found()
    for sample, parameter in zip(chosen, model.held, strict=True):
        parameter.grad = _base(sample, form)
        for kind, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
            with torch.no_grad():
                _compare(sample, kind, tensor, form, found)
    return found


def _base(sample: Sample, form: str) -> Tensor:
    """A new tensor of the values, or one of which they are the rows but the first."""
    return torch.cat([sample.values[:1], sample.values]) if form == "view" else sample.values.clone()


def _operand(tensor: Tensor, form: str) -> Tensor:
    return tensor[1:] if form == "view" else tensor


def _compare(sample: Sample, kind: str, tensor: Tensor, form: str, found: Found) -> None:
    plain = _base(sample, form)
    expected = sample.on(_operand(plain, form))
    shared = {plain.untyped_storage().data_ptr()}
    views = [i for i, leaf in enumerate(tree_leaves(expected)) if _address(leaf) in shared]
    try:
        result = sample.on(_operand(tensor, form))
    except (MiCSError, RuntimeError, NotImplementedError) as error:
        found.refused[sample.name] = f"{type(error).__name__}: {error}"
        return
    is_right = _equal((result, tensor), (expected, plain))
    if is_right and views:
        leaves = tree_leaves(result), tree_leaves(expected)
        for leaf in (leaves[0][views[-1]], leaves[1][views[-1]]):
            leaf.mul_(3)
        is_right = _equal((tensor, result), (plain, expected))
    found.num_right += is_right
    if not is_right:
        found.wrong.append(f"{sample.name} of a {kind} {tuple(plain.shape)}")


def _address(leaf: object) -> int:
    is_dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided and bool(leaf.numel())
    overlaps = is_dense and 0 in leaf.stride() and leaf.numel() > 1  # expanded: torch refuses writes
    return leaf.untyped_storage().data_ptr() if is_dense and not overlaps else -1


@_quiet()
def sweep_gradients(ctx: RankContext, preset: str, every: int, form: str) -> Found:
    """Each operator in a loss in which every rank weighs its results differently, and in one of parameters alone."""
    chosen = samples(every, in_place=False, differentiable=True, form=form)
    model = Holder(chosen, form)
    shard(model, ShardConfig.preset(preset))
    found = Found()
    for sample, parameter in zip(chosen, model.held, strict=True):
        for is_alone in (False, True):
            plain = sample.values.clone().requires_grad_()
            ranks = [None] if is_alone else [*range(ctx.world_size)]
            losses = [_weighted(sample.on(plain), rank) for rank in ranks]
            if not isinstance(losses[0], Tensor):
                continue  # it has no differentiable result
            (sum(losses) / len(losses)).backward()
            parameter.grad = None
            try:
                _weighted(sample.on(parameter), None if is_alone else ctx.rank).backward()
                is_right = _equal(parameter.grad, plain.grad)
            except (MiCSError, RuntimeError, NotImplementedError) as error:
                found.refused[sample.name] = f"{type(error).__name__}: {error}"
                continue
            found.num_right += is_right
            if not is_right:
                found.wrong.append(f"gradient of {sample.name} {tuple(plain.shape)}{' alone' * is_alone}")
    return found


def _weighted(result: Any, rank: int | None) -> Any:
    """The sum of results times random numbers of a rank; without a rank, of their squares."""
    generator = torch.Generator().manual_seed(rank or 0)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    real = [leaf for leaf in outputs if leaf.is_floating_point()]
    if rank is None:
        return sum(leaf.square().sum() for leaf in real)
    return sum((leaf * torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator)).sum() for leaf in real)
