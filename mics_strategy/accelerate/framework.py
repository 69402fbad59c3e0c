"""Private names of Accelerate, transformers and TRL that the adapter depends on.

All of them are in this file, so that a new release is checked against one page: how Accelerate's process-wide state is
made and set to "sharded", the functions by which Accelerate and `transformers.Trainer` save and load sharded models,
where that Trainer's loop is open to others, and the function by which TRL's Trainers shard a model that is only
evaluated.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    AutocastKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from torch import nn
from torch._C._distributed_c10d import HashStore
from typing_extensions import override

from mics_strategy import ConfigError
from mics_strategy.accelerate import launch
from mics_strategy.accelerate.plugin import MiCSPlugin
from mics_strategy.checkpoint.whole_tensors import whole_tensors

_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
_IMPORTERS = ("accelerate.utils.fsdp_utils", "accelerate.utils", "accelerate.accelerator", "transformers.trainer")
_TRL_PREPARE = "prepare_fsdp"  # takes a model and an Accelerator; calls torch's `fully_shard`
_signature = inspect.signature(Accelerator.__init__)  # before any class derives from it


def arguments(accelerator: Accelerator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Bind the arguments of ``Accelerator(...)`` to their names.

    Raises:
        TypeError: The arguments do not fit the signature.
    """
    bound = dict(_signature.bind(accelerator, *args, **kwargs).arguments)
    del bound["self"]
    return bound


def current_plugin() -> Any:
    """Return the FSDP plugin of this process's Accelerator; None if there is none."""
    return getattr(AcceleratorState(), "fsdp_plugin", None) if is_started() else None


def is_started() -> bool:
    """Whether this process has an Accelerator whose state still exists."""
    return bool(AcceleratorState._shared_state)


def start_state(accelerator_args: Mapping[str, Any], plugin: MiCSPlugin) -> None:
    """Make the process-wide state as `Accelerator` would, and mark the job as sharded.

    Accelerate itself does so only on GPUs, and not after an earlier state was reset.

    Args:
        accelerator_args: Arguments of `Accelerator`, by name.
        plugin: Plugin, stored as the state's `fsdp_plugin`.

    Raises:
        ConfigError: The kind of job is not supported, or its processes are not connected.
    """
    handlers = accelerator_args.get("kwargs_handlers") or ()
    group: dict[str, Any] = next(
        (handler.to_kwargs() for handler in handlers if isinstance(handler, InitProcessGroupKwargs)), {}
    )
    dynamo = accelerator_args.get("dynamo_plugin")
    if dynamo is None:
        backend = accelerator_args.get("dynamo_backend")
        dynamo = TorchDynamoPlugin() if backend is None else TorchDynamoPlugin(backend=backend)
    state = AcceleratorState(
        mixed_precision=accelerator_args.get("mixed_precision"),
        cpu=accelerator_args.get("cpu", False),
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
            f"Accelerate runs on {state.distributed_type}, but MiCS supports only CPUs and CUDA GPUs. Use one of them."
        )
    if state.mixed_precision == "fp8":
        raise ConfigError("`mixed_precision='fp8'` is not supported. Use 'bf16', 'fp16' or 'no'.")
    num_processes = dist.get_world_size() if dist.is_initialized() else launch.num_processes()
    if state.num_processes != num_processes:
        raise ConfigError(
            f"This job has {num_processes} processes, but Accelerate sees {state.num_processes}. It reads their number "
            "from the launcher's environment variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). "
            "Without a GPU, it starts a process group only if the CPU is requested. Set ACCELERATE_USE_CPU=true, or "
            "use `Accelerator(cpu=True)` or `TrainingArguments(use_cpu=True)`."
        )


def lacks_device() -> bool:
    """Whether the CPU must be requested: no accelerator, and no state yet."""
    return PartialState._shared_state == {} and not torch.accelerator.is_available()


def ensure_group(device: torch.device) -> None:
    """Make a process group of this process only, if a script runs without a launcher."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`'s wrapper."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside Accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def is_prepared(item: Any) -> bool:
    """Whether `prepare` has already returned this object."""
    return getattr(item, "_is_accelerate_prepared", False) is True


def mark_prepared(accelerator: Any, items: tuple[Any, ...]) -> None:
    """Mark the objects that Accelerate has prepared."""
    containers = (accelerator._models, accelerator._optimizers, accelerator._dataloaders, accelerator._schedulers)
    prepared_ids = {id(prepared) for container in containers for prepared in container}
    for item in items:
        if id(item) in prepared_ids:
            item._is_accelerate_prepared = True


def two_pass_prepare(accelerator: Any, items: tuple[Any, ...], placements: list[bool | None]) -> tuple[Any, ...]:
    """Prepare objects one by one, schedulers last: they look up their optimizers."""
    first_pass = tuple(
        accelerator._prepare_one(item, first_pass=True, device_placement=placement)
        for item, placement in zip(items, placements, strict=True)
    )
    return tuple(accelerator._prepare_one(item) for item in first_pass)


@contextmanager
def without_autocast(accelerator: Any) -> Iterator[None]:
    """Prepare a model without wrapping its forward in autocast."""
    previous, accelerator.native_amp = accelerator.native_amp, False
    try:
        yield
    finally:
        accelerator.native_amp = previous


def disable_autocast_cache(accelerator: Any) -> None:
    """Let autocast cast weights at every use, unless `AutocastKwargs` were given."""
    if accelerator.autocast_handler is None:
        accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)


@contextmanager
def without_scaler(accelerator: Any) -> Iterator[Any]:
    """Load a state without its scaler, and yield the scaler.

    Accelerate's code for FSDP2 loads a scaler incorrectly if it was in use.
    """
    scaler, accelerator.scaler = accelerator.scaler, None
    try:
        yield scaler
    finally:
        accelerator.scaler = scaler


class _RepeatLast(list[Any]):
    """List of models that repeats its last. Accelerate pairs the i-th model with the i-th optimizer."""

    @override
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(min(index, len(self) - 1) if isinstance(index, int) else index)


@contextmanager
def with_own_checkpoint_paths(accelerator: Any) -> Iterator[None]:
    """Save and load at given paths, also with automatic naming. There may be more optimizers than models."""
    configuration = accelerator.project_configuration
    previous = configuration.automatic_checkpoint_naming, accelerator._models
    configuration.automatic_checkpoint_naming, accelerator._models = False, _RepeatLast(accelerator._models)
    try:
        yield
    finally:
        configuration.automatic_checkpoint_naming, accelerator._models = previous


@contextmanager
def with_whole_custom_states(accelerator: Any) -> Iterator[None]:
    """Save whole tensors, not shards, of what was registered for checkpointing."""
    custom = accelerator._custom_objects
    accelerator._custom_objects = [_WholeState(registered) for registered in custom]
    try:
        yield
    finally:
        accelerator._custom_objects = custom


class _WholeState:
    def __init__(self, registered: Any) -> None:
        self._registered = registered

    def state_dict(self) -> Any:
        return whole_tensors(self._registered.state_dict)


def patch_constructor(choose: Callable[[type[Any], tuple[Any, ...], dict[str, Any]], type[Any]]) -> None:
    """Make ``Accelerator(...)`` construct the class that `choose` returns.

    Args:
        choose: Function of the requested class, its positional and its keyword arguments.
    """
    if "__new__" in Accelerator.__dict__:
        return

    def __new__(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        return object.__new__(choose(cls, args, kwargs))

    Accelerator.__new__ = __new__


def on_construct(check: Callable[[Accelerator, Any], None]) -> None:
    """Call `check` with every new Accelerator and with its FSDP plugin or None."""
    stock = Accelerator.__init__
    if hasattr(stock, "mics_stock"):
        return

    @functools.wraps(stock)
    def checked(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        check(self, arguments(self, args, kwargs).get("fsdp_plugin"))
        stock(self, *args, **kwargs)

    checked.mics_stock = stock  # type: ignore[attr-defined]
    Accelerator.__init__ = checked


def patch_fsdp_version() -> None:
    """Let stock FSDP plugins read ``fsdp_version: mics`` as FSDP2. Idempotent.

    A script may build one itself. `MiCSPlugin.from_fsdp_plugin` then converts it.
    """
    stock = FullyShardedDataParallelPlugin.__post_init__
    if hasattr(stock, "mics_stock"):
        return

    @functools.wraps(stock)
    def read_environment(self: Any) -> None:
        launch.check_version()
        if launch.is_enabled() and self.fsdp_version is None:
            self.fsdp_version = 2
        stock(self)

    read_environment.mics_stock = stock  # type: ignore[attr-defined]
    FullyShardedDataParallelPlugin.__post_init__ = read_environment


def patch_function(name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of Accelerate for jobs with `MiCSPlugin`.

    It is replaced in every module that imported it.

    Args:
        name: Name of a function whose first argument is the FSDP plugin.
        replacement: Function with the same arguments.
    """
    stock = getattr(accelerate.utils, name)
    if hasattr(stock, "mics_stock"):
        return

    @functools.wraps(stock)
    def dispatch(plugin: Any, *args: Any, **kwargs: Any) -> Any:
        return (replacement if isinstance(plugin, MiCSPlugin) else stock)(plugin, *args, **kwargs)

    dispatch.mics_stock = stock  # type: ignore[attr-defined]
    for importer in _IMPORTERS:
        module = sys.modules.get(importer)
        if getattr(module, name, None) is stock:
            setattr(module, name, dispatch)


def patch_trl_prepare(replacement: Callable[[nn.Module, Accelerator], nn.Module]) -> None:
    """Make TRL shard reference and reward models by `replacement`.

    This applies to the imported Trainers in jobs with `MiCSPlugin`.

    Args:
        replacement: Function that returns a model ready for evaluation.
    """
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "trl"]:
        stock = vars(module).get(_TRL_PREPARE)
        if stock is not None and not hasattr(stock, "mics_stock"):
            setattr(module, _TRL_PREPARE, _for_our_plugin(stock, replacement))


@contextmanager
def trainer_hooks(
    trainer: Any,
    after_step: Callable[[], None],
    set_random_states: Callable[[Callable[[str | None], None], str | None], None],
) -> Iterator[None]:
    """Take part in the loop of a `transformers.Trainer`.

    Args:
        trainer: The Trainer.
        after_step: Called behind what it does after each optimizer step (log, evaluate, save), and after each epoch.
        set_random_states: Called where it loads the random states of a checkpoint, with its own function, which takes
            the path, and the path.
    """
    stock_after, stock_load = trainer._maybe_log_save_evaluate, trainer._load_rng_state

    def and_then(*args: Any, **kwargs: Any) -> None:
        stock_after(*args, **kwargs)
        after_step()

    trainer._maybe_log_save_evaluate = and_then
    trainer._load_rng_state = functools.partial(set_random_states, stock_load)
    try:
        yield
    finally:
        del trainer._maybe_log_save_evaluate, trainer._load_rng_state


def checkpoint_state(trainer: Any) -> dict[str, Any]:
    """What a `transformers.Trainer` saves beside model, optimizer and random states, as plain data. Collective."""
    trainer.store_flos()
    kind = sys.modules["transformers.trainer_callback"].ExportableState
    callbacks = [item for item in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(item, kind)]
    exported = type(trainer.state)(stateful_callbacks=callbacks).stateful_callbacks
    scaler = trainer.accelerator.scaler
    return {
        "trainer": json.dumps(dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=exported))),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def write_checkpoint_files(trainer: Any, folder: Path, state: Mapping[str, Any]) -> None:
    """Write a `checkpoint_state` as a folder from which a Trainer resumes.

    Those of model and optimizer are empty: the functions that load them know the folder.
    """
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / name).mkdir()
    (folder / "trainer_state.json").write_text(state["trainer"])
    torch.save(state["scheduler"], folder / "scheduler.pt")
    if state["scaler"] is not None and trainer.accelerator.scaler is not None:
        torch.save(state["scaler"], folder / "scaler.pt")


def externally_read_output_layer(model: nn.Module) -> nn.Module | None:
    """Return the output layer if a forward of TRL reads its weight without a call."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        function = getattr(module.__dict__.get("forward"), "__func__", None)
        origin: str = getattr(function, "__globals__", {}).get("__name__", "")
        if origin.partition(".")[0] == "trl":
            layer = module.get_output_embeddings()
            return layer if isinstance(layer, nn.Module) else None
    return None


def _for_our_plugin(stock: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def dispatch(model: nn.Module, accelerator: Accelerator) -> Any:
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        return (replacement if isinstance(plugin, MiCSPlugin) else stock)(model, accelerator)

    dispatch.mics_stock = stock  # type: ignore[attr-defined]
    return dispatch
