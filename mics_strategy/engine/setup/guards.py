"""Checks of a model before `shard()`, and guards against changes after it.

A model that would fail later, on one rank or without an error, raises here on every rank.

In a sharded model, values may change by any write into the existing parameters. The parameters themselves must stay:
this rank alone, or no rank, would train one that was added, replaced or converted, without an error.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from types import MethodType
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mics_strategy.comm.consensus import gather_objects
from mics_strategy.engine.aliases import check_memory
from mics_strategy.engine.autograd import refuse_conversion
from mics_strategy.engine.backward_grads import sparse_gradients
from mics_strategy.engine.parameter import ShardedParameter, has_node_hooks
from mics_strategy.errors import ConfigError, LifecycleError

_MARK = "_mics_sharded"
_WRAPPERS = (nn.DataParallel, DistributedDataParallel, FullyShardedDataParallel)
_OTHER_ENGINES: tuple[Any, ...] = (*_WRAPPERS, FSDPParamGroup)  # the last one is of `fully_shard`


def check_model(module: nn.Module, target: torch.device) -> None:
    """Raise for a model that cannot be sharded.

    Args:
        module: Model to shard.
        target: Device to train on.

    Raises:
        ConfigError: A parameter or module is not supported. The error names the first one and the remedy.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"`model` is a {type(module).__name__}, not a module. Pass the model itself.")
    for name, child in module.named_modules():
        if hasattr(child, _MARK):
            raise ConfigError(
                f"`{name or type(child).__name__}` is sharded already. Call `shard()` once, on the outermost model."
            )
        if isinstance(child, _WRAPPERS):
            raise ConfigError(
                f"`{name or 'model'}` is a {type(child).__name__}, which would synchronize gradients as well. Shard "
                "the plain model inside of it (`.module`), and train that one."
            )
        if getattr(child, "sparse", False) is True and isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            raise sparse_gradients(name)
        if getattr(child, "max_norm", None) is not None and isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            raise ConfigError(
                f"`{name}` renormalizes the rows that a batch looks up (`max_norm={child.max_norm}`). Each rank has "
                "another batch, so parameters would diverge between ranks. Build it without `max_norm` and "
                "renormalize after `optimizer.step()`, under `torch.no_grad()`: `weight.mul_((max_norm / "
                "weight.norm(dim=1, keepdim=True).clamp(min=1e-7)).clamp(max=1))`."
            )
    for name, parameter in module.named_parameters():
        _check_parameter(name, parameter, target)
    check_memory(module)


def _check_parameter(name: str, parameter: nn.Parameter, target: torch.device) -> None:
    if isinstance(parameter, DTensor):
        raise ConfigError(f"`{name}` is a DTensor, so this model is sharded already. Shard the plain model.")
    if type(parameter) is not nn.Parameter:
        raise ConfigError(
            f"`{name}` is a {type(parameter).__name__}, not a plain parameter. Initialize or unwrap the model before "
            "`shard()`."
        )
    if parameter.requires_grad and parameter.is_complex():
        raise ConfigError(
            f"`{name}` is complex. Reductions do not support complex dtypes. Keep its real and imaginary parts as two "
            "parameters."
        )
    if parameter.requires_grad and not parameter.is_floating_point():
        raise ConfigError(
            f"`{name}` has integer dtype {parameter.dtype} and requires gradients. Freeze it with "
            "`requires_grad_(False)`."
        )
    if parameter.device.type not in ("meta", "cpu") and parameter.device != target:
        raise ConfigError(
            f"`{name}` is on {parameter.device}, but this rank trains on {target}. Move the model to {target}, or "
            "leave it on the CPU or meta device."
        )
    if parameter.layout is not torch.strided:
        raise ConfigError(f"`{name}` has layout {parameter.layout}. Make it dense (`torch.strided`).")
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    if any(hooks) or has_node_hooks(parameter):
        raise ConfigError(
            f"`{name}` has gradient hooks, which would never run on its shards. Remove them. Read `grad`, change it "
            "and step optimizers after the backward, or register a hook on the module's outputs."
        )


def model_fingerprint(module: nn.Module) -> str:
    """A short text, equal on ranks with the same parameters in the same order."""
    lines = _parameter_lines(module)
    return f"{len(lines)} parameters, digest {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"


def check_same_model(module: nn.Module, fingerprints: Sequence[str]) -> None:
    """Name the first parameter that differs between ranks. Collective where the fingerprints of the ranks differ.

    Raises:
        ConfigError: They differ.
    """
    by_rank = gather_objects(_parameter_lines(module)) if len({*fingerprints}) > 1 else []
    for rank, lines in enumerate(by_rank):
        for first, line in itertools.zip_longest(by_rank[0], lines, fillvalue="no more parameters"):
            if first != line:
                raise ConfigError(
                    f"`model` differs between ranks: {first} on rank 0, {line} on rank {rank}. Build the same model, "
                    "with the same parameters frozen, on every rank."
                )


def _parameter_lines(module: nn.Module) -> list[str]:
    return [
        f"`{name}` {list(p.shape)} {str(p.dtype).removeprefix('torch.')}{'' if p.requires_grad else ' frozen'}"
        for name, p in module.named_parameters()
    ]


def gradients_fingerprint(module: nn.Module) -> str:
    """A short text, equal on ranks whose parameters have gradients in the same places."""
    names = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    return f"{len(names)}, digest {zlib.crc32(' '.join(names).encode()):x}"


def count_meta_tensors(module: nn.Module) -> str:
    """The number of tensors on the meta device, as a text."""
    num = sum(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    return f"{num} parameters and buffers without values"


def refuse_other_engines() -> None:
    """Make torch's own data parallel engines raise for sharded parameters, once."""
    for engine in _OTHER_ENGINES:
        if not hasattr(engine.__init__, "mics_wraps"):
            engine.__init__ = _without_sharded_parameters(engine.__init__)


def _without_sharded_parameters(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def construct(self: object, *args: Any, **kwargs: Any) -> None:
        target = args[0] if args else next(iter(kwargs.values()), ())
        parameters = target.parameters() if isinstance(target, nn.Module) else target
        if any(isinstance(parameter, ShardedParameter) for parameter in parameters):
            raise ConfigError(
                f"A {type(self).__name__} was built on parameters that `shard()` has sharded. A sharded model is data "
                "parallel already. Use it as it is, or use the other engine on the plain model."
            )
        stock(self, *args, **kwargs)

    construct.mics_wraps = stock  # type: ignore[attr-defined]
    return construct


def mark_sharded(module: nn.Module, handle: object) -> None:
    """Mark a module as sharded, and keep `handle` alive as long as the module."""
    object.__setattr__(module, _MARK, handle)


def block_conversions(modules: Iterable[nn.Module]) -> None:
    """Make ``to()``, ``half()`` and similar methods raise for sharded parameters.

    A conversion that changes no parameter (to their own device and dtype) still converts the buffers.
    """
    for module in modules:
        object.__setattr__(module, "_apply", _BlockedApply(module))


class _BlockedApply:
    """Replacement of ``nn.Module._apply`` in one sharded module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Apply `convert` to the buffers if it does not change parameters.

        Args:
            convert: Function from a tensor to the converted one.
            recurse: Whether buffers of inner modules are converted.

        Raises:
            LifecycleError: `convert` would change a parameter's dtype or device.
        """
        for name, parameter in self._module.named_parameters():
            probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            converted = convert(probe)
            if converted.dtype != probe.dtype or converted.device != probe.device:
                raise LifecycleError(
                    f"`{name}` is sharded as {probe.dtype} on {probe.device} and cannot become {converted.dtype} on "
                    f"{converted.device}. Convert the model before `shard()`. To compute in another dtype, set "
                    "`param_dtype`."
                )
        for module in self._module.modules() if recurse else [self._module]:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = convert(buffer)
        return self._module


def block_copies(modules: Iterable[nn.Module]) -> None:
    """Make pickling, deep-copying and scripting of `modules` raise `LifecycleError`."""
    for module in modules:
        object.__setattr__(module, "__reduce_ex__", _raise_on_copy)  # pickle and copy read the object first
        object.__setattr__(module, "__prepare_scriptable__", refuse_conversion)  # which `torch.jit.script` calls


def _raise_on_copy(_: Any) -> NoReturn:
    raise LifecycleError(
        "A sharded model cannot be pickled or copied, because each rank has only its shards. Save "
        "`full_state_dict()`, or copy the plain model before `shard()`."
    )


def block_saving_shards(modules: Iterable[nn.Module]) -> None:
    """Make `save_pretrained` of Hugging Face libraries raise instead of saving shards.

    Without this guard that of transformers, peft and diffusers fails on views and pointers of DTensors, on some
    ranks or on rank 0 only.
    """
    for module in modules:
        if hasattr(type(module), "save_pretrained"):
            object.__setattr__(module, "save_pretrained", _CheckedSave(module, cast("Any", module).save_pretrained))


class _CheckedSave:
    """Replacement of ``save_pretrained`` in one sharded module."""

    def __init__(self, module: nn.Module, save: Callable[..., Any]) -> None:
        self._module = module
        self._save = save
        self.__signature__ = inspect.signature(save)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Save the tensors in `state_dict=`.

        Raises:
            LifecycleError: `state_dict` holds shards, or is missing, so that the model's shards would be saved. Raised
                on every calling rank before anything is written or sent.
        """
        arguments = self.__signature__.bind_partial(*args, **kwargs).arguments
        state = arguments.get("state_dict", kwargs.get("state_dict"))
        values = self._module.parameters() if state is None else state.values()
        if any(isinstance(value, DTensor) for value in values):
            raise LifecycleError(
                "`save_pretrained()` would write the shards of this rank, not the model. Call `state = "
                "sharded.full_state_dict()` (with Accelerate `accelerator.get_state_dict(model)`) on every rank. Then "
                "call `model.save_pretrained(folder, state_dict=state)` on rank 0. If rank 0 cannot hold the model, "
                "save a sharded checkpoint and convert it with `mics export`."
            )
        return self._save(*args, **kwargs)


def reset_before_access(model: nn.Module, reset: Callable[[], None]) -> None:
    """Call `reset` before the model's parameters are listed, cleared or saved.

    A backward that raises leaves unsharded parameters in the modules, and autograd has no callback for its end.
    """
    named_parameters_of_model = model.named_parameters

    def named_parameters(_: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        reset()
        return named_parameters_of_model(*args, **kwargs)

    object.__setattr__(model, "named_parameters", MethodType(named_parameters, model))
    model.register_state_dict_pre_hook(lambda *_: reset())


def check_parameters_unchanged(model: nn.Module, names_by_id: dict[int, str]) -> bool:
    """Raise for parameters that were added, replaced or removed after `shard()`.

    Args:
        model: Sharded model, outside of any forward.
        names_by_id: Names of its sharded parameters, by id.

    Returns:
        Whether the model could be checked. It cannot while `torch.func.functional_call` lends it plain tensors.

    Raises:
        LifecycleError: A parameter changed. The error names the first one.
    """
    found = [p for module in model.modules() for p in module._parameters.values() if p is not None]
    if set(map(type, found)) <= {ShardedParameter}:  # in every step, so the loops are C's
        own_names = map(attrgetter("mics_name"), found)
        if dict(zip(map(id, found), own_names, strict=True)) == names_by_id:
            return True
    present = dict(model.named_parameters())
    if any(not isinstance(parameter, nn.Parameter) for parameter in present.values()):
        return False  # lent tensors; a module raises when a plain tensor is assigned to a parameter
    for name, parameter in present.items():
        if id(parameter) not in names_by_id or not isinstance(parameter, ShardedParameter):
            raise LifecycleError(
                f"Parameter `{name}` was added, replaced or converted after `shard()`. Its gradient would not be "
                "synchronized. Change the model first, then shard it. To change values, write into the existing "
                "parameter. To lend values to `torch.func.functional_call`, pass plain tensors (`.detach()`)."
            )
        if names_by_id[id(parameter)] != parameter.mics_name:
            raise LifecycleError(
                f"Parameter `{name}` holds what belongs to `{parameter.mics_name}`, after `torch.utils.swap_tensors`. "
                "Copy the values instead: `parameter.data.copy_(other)`."
            )
    removed = set(names_by_id) - {id(parameter) for parameter in present.values()}
    if removed:
        names = ", ".join(sorted(names_by_id[identity] for identity in removed))
        raise LifecycleError(f"Parameter `{names}` was removed after `shard()`. Change the model first, then shard it.")
    return True
