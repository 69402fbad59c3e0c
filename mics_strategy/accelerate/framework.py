"""Which private names of Accelerate, transformers and TRL do we rely on?

Every one stands in this file, so that a new release is checked against one page: how Accelerate's process-wide state is
made and told that the job is sharded, the functions by which it and `transformers.Trainer` save and load sharded
models, and the one by which the Trainers of TRL shard a model that is only asked.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs, TorchDynamoPlugin
from torch import nn
from torch._C._distributed_c10d import HashStore
from typing_extensions import override

from mics_strategy import ConfigError
from mics_strategy.accelerate import launch
from mics_strategy.accelerate.plugin import MiCSPlugin

_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
_HOMES = ("accelerate.utils.fsdp_utils", "accelerate.utils", "accelerate.accelerator", "transformers.trainer")
_OF_TRL = "prepare_fsdp"  # of a model and an Accelerator; calls torch's `fully_shard`
_signature = inspect.signature(Accelerator.__init__)  # before anybody derives from it


def arguments(accelerator: Accelerator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``Accelerator(...)`` by name.

    Raises:
        TypeError: As Python does, for arguments that do not fit.
    """
    given = dict(_signature.bind(accelerator, *args, **kwargs).arguments)
    del given["self"]
    return given


def current_plugin() -> Any:
    """The FSDP plugin of the Accelerator that this process has made before; None without one."""
    return getattr(AcceleratorState(), "fsdp_plugin", None) if is_started() else None


def is_started() -> bool:
    """Whether this process has made an Accelerator whose state is still there."""
    return bool(AcceleratorState._shared_state)


def start_state(given: Mapping[str, Any], plugin: MiCSPlugin) -> None:
    """Make the process-wide state, as `Accelerator` would, and have it say that the job is sharded.

    Accelerate does so by itself on GPUs only, and not where an earlier state was reset.

    Args:
        given: The arguments of `Accelerator`.
        plugin: For its `fsdp_plugin`.

    Raises:
        ConfigError: The job is of a kind that is not supported, or its processes do not know of each other.
    """
    handlers = given.get("kwargs_handlers") or ()
    group: dict[str, Any] = next(
        (handler.to_kwargs() for handler in handlers if isinstance(handler, InitProcessGroupKwargs)), {}
    )
    dynamo = given.get("dynamo_plugin")
    if dynamo is None:
        backend = given.get("dynamo_backend")
        dynamo = TorchDynamoPlugin() if backend is None else TorchDynamoPlugin(backend=backend)
    state = AcceleratorState(
        mixed_precision=given.get("mixed_precision"),
        cpu=given.get("cpu", False),
        dynamo_plugin=dynamo,
        fsdp_plugin=plugin,
        _from_accelerator=True,
        **group,
    )
    try:
        _check_job(state)
    except ConfigError:
        AcceleratorState._reset_state()
        raise
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = plugin


def _check_job(state: Any) -> None:
    if state.distributed_type not in _SUPPORTED:
        raise ConfigError(
            f"Accelerate runs on {state.distributed_type}, and MiCS on CPUs and CUDA GPUs. Use one of them."
        )
    if state.mixed_precision == "fp8":
        raise ConfigError("`mixed_precision='fp8'` is not offered. Use 'bf16', 'fp16' or 'no'.")
    num_processes = dist.get_world_size() if dist.is_initialized() else launch.num_processes()
    if state.num_processes != num_processes:
        raise ConfigError(
            f"This job has {num_processes} processes, and Accelerate found {state.num_processes}. It counts those that "
            "a launcher tells of in the environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and "
            "without a GPU it starts no process group unless it is told to use the CPU. Set ACCELERATE_USE_CPU=true, "
            "or use `Accelerator(cpu=True)` or `TrainingArguments(use_cpu=True)`."
        )


def lacks_device() -> bool:
    """Whether this machine has no accelerator and no state has been made, so that the CPU is to be asked for."""
    return PartialState._shared_state == {} and not torch.accelerator.is_available()


def ensure_group(device: torch.device) -> None:
    """Make a process group of this process alone, where a script runs without a launcher."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside of `torch.compile`'s."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside of Accelerate's."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def is_prepared(item: Any) -> bool:
    """Whether `prepare` has returned an object before."""
    return getattr(item, "_is_accelerate_prepared", False) is True


def mark_prepared(accelerator: Any, items: tuple[Any, ...]) -> None:
    """Have Accelerate know what `prepare` returns, of what it prepares."""
    containers = (accelerator._models, accelerator._optimizers, accelerator._dataloaders, accelerator._schedulers)
    known = {id(each) for container in containers for each in container}
    for item in items:
        if id(item) in known:
            item._is_accelerate_prepared = True


def two_pass_prepare(accelerator: Any, items: tuple[Any, ...], placements: list[bool | None]) -> tuple[Any, ...]:
    """Prepare objects one by one: schedulers last, as they look for their optimizers."""
    first = tuple(
        accelerator._prepare_one(item, first_pass=True, device_placement=placement)
        for item, placement in zip(items, placements, strict=True)
    )
    return tuple(accelerator._prepare_one(item) for item in first)


@contextmanager
def without_autocast(accelerator: Any) -> Iterator[None]:
    """Prepare a model without wrapping its forward in autocast."""
    before, accelerator.native_amp = accelerator.native_amp, False
    try:
        yield
    finally:
        accelerator.native_amp = before


@contextmanager
def without_scaler(accelerator: Any) -> Iterator[Any]:
    """Load a state without its scaler, which Accelerate's FSDP2 loads wrongly where it was in use; yields it."""
    scaler, accelerator.scaler = accelerator.scaler, None
    try:
        yield scaler
    finally:
        accelerator.scaler = scaler


class _RepeatLast(list[Any]):
    """Models, of which the last is paired with every further optimizer: Accelerate asks for the i-th of both."""

    @override
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(min(index, len(self) - 1) if isinstance(index, int) else index)


@contextmanager
def with_own_checkpoint_paths(accelerator: Any) -> Iterator[None]:
    """Save and load where one says, though the project counts its checkpoints itself; more optimizers than models."""
    configuration = accelerator.project_configuration
    before = configuration.automatic_checkpoint_naming, accelerator._models
    configuration.automatic_checkpoint_naming, accelerator._models = False, _RepeatLast(accelerator._models)
    try:
        yield
    finally:
        configuration.automatic_checkpoint_naming, accelerator._models = before


def patch_constructor(choose: Callable[[type[Any], tuple[Any, ...], dict[str, Any]], type[Any]]) -> None:
    """Let ``Accelerator(...)`` construct the class that `choose` gives for the class asked for and its arguments."""
    if "__new__" in Accelerator.__dict__:
        return

    def __new__(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        return object.__new__(choose(cls, args, kwargs))

    Accelerator.__new__ = __new__


def on_construct(check: Callable[[Accelerator, Any], None]) -> None:
    """Call `check` for every Accelerator, of whatever class, with the FSDP plugin that it is given, or None."""
    stock = Accelerator.__init__
    if hasattr(stock, "mics_stock"):
        return

    @functools.wraps(stock)
    def checked(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        check(self, arguments(self, args, kwargs).get("fsdp_plugin"))
        stock(self, *args, **kwargs)

    checked.mics_stock = stock  # type: ignore[attr-defined]
    Accelerator.__init__ = checked


def patch_function(name: str, ours: Callable[..., Any]) -> None:
    """Let a function of Accelerate, wherever it was imported to, be `ours` for jobs with our plugin.

    Args:
        name: Of a function whose first argument is the FSDP plugin.
        ours: With the same arguments.
    """
    stock = getattr(accelerate.utils, name)
    if hasattr(stock, "mics_stock"):
        return

    @functools.wraps(stock)
    def either(plugin: Any, *args: Any, **kwargs: Any) -> Any:
        return (ours if isinstance(plugin, MiCSPlugin) else stock)(plugin, *args, **kwargs)

    either.mics_stock = stock  # type: ignore[attr-defined]
    for home in _HOMES:
        module = sys.modules.get(home)
        if getattr(module, name, None) is stock:
            setattr(module, name, either)


def patch_trl_prepare(ours: Callable[[nn.Module, Accelerator], nn.Module]) -> None:
    """Let the Trainers of TRL, where they are imported, shard reference and reward models by `ours` with our plugin.

    Args:
        ours: Returns a model ready to be evaluated.
    """
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "trl"]:
        stock = vars(module).get(_OF_TRL)
        if stock is not None and not hasattr(stock, "mics_stock"):
            setattr(module, _OF_TRL, _for_our_plugin(stock, ours))


def externally_read_output_layer(model: nn.Module) -> nn.Module | None:
    """The output layer, where a forward that TRL has given the model reads its weight and does not call it."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        function = getattr(module.__dict__.get("forward"), "__func__", None)
        home: str = getattr(function, "__globals__", {}).get("__name__", "")
        if home.partition(".")[0] == "trl":
            layer = module.get_output_embeddings()
            return layer if isinstance(layer, nn.Module) else None
    return None


def _for_our_plugin(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def either(model: nn.Module, accelerator: Accelerator) -> Any:
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        return (ours if isinstance(plugin, MiCSPlugin) else stock)(model, accelerator)

    either.mics_stock = stock  # type: ignore[attr-defined]
    return either
