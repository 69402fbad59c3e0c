"""Patches of transformers and TRL for sharded models: Trainers, `save_pretrained`.

`save_model` of transformers writes nothing if checkpoints are sharded. Patched, it writes the model as
`from_pretrained` loads it, in every case; intermediate checkpoints remain sharded.

Unpatched, transformers loads weights in several files only into unsharded parameters. Patched, it loads them into
shards.

TRL shards models that are only evaluated, such as a reference, with torch's FSDP2 instead of the Accelerator. Patched,
the Accelerator shards them like the trained model.

All ranks call ``model.save_pretrained(folder, is_main_process=accelerator.is_main_process,
save_function=accelerator.save)``; only the main process writes. Patched, all ranks gather the full model, and the main
process writes it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.func import functional_call

from mics_strategy import CheckpointError, Sharded, finish_delayed, load_weights
from mics_strategy.accelerate import framework
from mics_strategy.accelerate.plugin import MiCSPlugin
from mics_strategy.accelerate.trainer_snapshots import snapshots_during
from mics_strategy.comm.consensus import run_on_all_ranks, run_on_files
from mics_strategy.snapshots.job import RecoveryOptions

if TYPE_CHECKING:
    from mics_strategy.accelerate.checkpoints import SaveRendezvous

HandleLookup = Callable[[nn.Module], Sharded | None]


def patch_trainers(sharded_of_model: HandleLookup) -> None:
    """Patch the imported Trainers: full saves, loads, evaluation, snapshots, the end of a training. Idempotent.

    Args:
        sharded_of_model: Returns the handle of a sharded model, and None for others.
    """
    framework.patch_trl_prepare(_prepare_for_eval)
    module = sys.modules.get("transformers.trainer")
    if module is None or hasattr(module.Trainer.save_model, "mics_stock"):
        return
    module.Trainer.save_model = _save_full(module.Trainer.save_model)
    module.Trainer.train = _to_the_end(module.Trainer.train, sharded_of_model)
    module.load_sharded_checkpoint = _load_into_shards(module.load_sharded_checkpoint, sharded_of_model)  # type: ignore[attr-defined]


def _to_the_end(stock: Callable[..., Any], sharded_of_model: HandleLookup) -> Callable[..., Any]:
    """A `train` that finishes outer steps, and in which gradients left by delayed second hops make a last step.

    It takes snapshots, and continues from them, where the plugin asks for them.
    """

    @functools.wraps(stock)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        recovery = plugin.recovery if isinstance(plugin, MiCSPlugin) else RecoveryOptions.of("none")
        with snapshots_during(self, recovery) as snapshots:
            if snapshots is not None and snapshots.path is not None:
                kwargs.pop("resume_from_checkpoint", None)
                args = (snapshots.path, *args[1:])
            result = stock(self, *args, **kwargs)
            sharded = sharded_of_model(self.model)
            if sharded is not None and not sharded.internals.pending_micro_steps and finish_delayed(sharded):
                if self.args.max_grad_norm:
                    sharded.clip_grad_norm_(self.args.max_grad_norm)
                getattr(self.optimizer, "optimizer", self.optimizer).step()  # past the loss scale of an accelerator's
                self.optimizer.zero_grad()
        return result

    return train


def _prepare_for_eval(model: nn.Module, accelerator: Any) -> nn.Module:
    prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    return prepared.eval()


def _save_full(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if not isinstance(plugin, MiCSPlugin):
            stock(self, output_dir, _internal_call)
            return
        is_checkpoint = _internal_call and output_dir is not None
        if is_checkpoint and self.args.should_save and plugin.state_dict_type is not StateDictType.FULL_STATE_DICT:
            Path(str(output_dir)).mkdir(parents=True, exist_ok=True)  # which the caller looks for
        with nullcontext() if is_checkpoint else _with_full_state_dicts(plugin), _saving_whole_model(self):
            stock(self, output_dir, _internal_call)

    save_model.mics_stock = stock  # type: ignore[attr-defined]
    return save_model


def _check_writer(args: Any) -> None:
    if args.should_save and args.process_index > 0:
        raise CheckpointError(
            "`save_on_each_node=True` would write the model on every node, but it is gathered on rank 0 only. Save to "
            "a shared file system without `save_on_each_node`, or copy the folder to the other nodes."
        )


@contextmanager
def _saving_whole_model(trainer: Any) -> Iterator[None]:
    """Let `_save` of `trainer` run on rank 0 alone, on a model of plain tensors.

    These are the ones that were gathered for it. A subclass may write files its own way, without the state dict that
    it gets: that of sentence-transformers calls `save_pretrained` of its modules.
    """
    save = trainer._save

    def save_whole(output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        run_on_all_ranks(lambda: _check_writer(trainer.args))
        model = _SavedModel(framework.unwrap_model(trainer.model))
        tensors = {f"model.{k}": v for k, v in (state_dict or {}).items() if isinstance(v, torch.Tensor)}
        arguments = (lambda: save(output_dir, state_dict),)
        run_on_files(lambda: functional_call(model, tensors, arguments) if trainer.args.process_index == 0 else None)

    trainer._save = save_whole
    try:
        yield
    finally:
        del trainer._save


class _SavedModel(nn.Module):
    """Module whose forward calls a function. So `functional_call` gives `model` other tensors while it runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], None]) -> None:
        call()


def _load_into_shards(stock: Callable[..., Any], sharded_of_model: HandleLookup) -> Callable[..., Any]:
    @functools.wraps(stock)
    def load_sharded_checkpoint(model: nn.Module, folder: str, strict: bool = True, **options: Any) -> Any:
        handle = sharded_of_model(framework.unwrap_model(model))
        if handle is None:
            return stock(model, folder, strict=strict, **options)
        return load_weights(Path(folder), handle, strict=strict)

    return load_sharded_checkpoint


@contextmanager
def _with_full_state_dicts(plugin: MiCSPlugin) -> Iterator[None]:
    previous, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
    try:
        yield
    finally:
        plugin.state_dict_type = previous


_COLLECTIVE_ARGUMENTS = ("is_main_process", "save_function")  # arguments of a call on all ranks


def patch_save_pretrained(sharded: Sharded, rendezvous: SaveRendezvous) -> None:
    """Make `save_pretrained` gather the model if all ranks call it. Idempotent.

    Args:
        sharded: Handle of the model.
        rendezvous: SaveRendezvous of all ranks with a timeout, so that a rank that calls alone does not wait forever.
    """
    for name, module in sharded.model.named_modules():
        stock = vars(module).get("save_pretrained")
        if stock is not None and not isinstance(stock, _FullSave):
            object.__setattr__(module, "save_pretrained", _FullSave(stock, module, name, sharded, rendezvous))


class _FullSave:
    """Replacement of ``save_pretrained`` of one module of a prepared model."""

    def __init__(
        self, stock: Callable[..., Any], module: nn.Module, name: str, sharded: Sharded, rendezvous: SaveRendezvous
    ) -> None:
        self._stock = stock
        self._prefix = f"{name}." if name else ""
        self._sharded = sharded
        self._rendezvous = rendezvous
        self.__signature__ = inspect.signature(stock)
        self._takes_state = "state_dict" in self.__signature__.parameters or hasattr(module, "peft_config")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Save the full module if all ranks call; otherwise save `state_dict=`.

        Raises:
            CheckpointError: A rank did not call, or could not write. Raised on every rank.
            LifecycleError: A rank calls alone, without `state_dict`.
        """
        bound = self.__signature__.bind_partial(*args, **kwargs).arguments
        arguments = {**bound, **bound.get("kwargs", {})}
        if arguments.get("state_dict") is not None or not (
            self._takes_state and any(n in arguments for n in _COLLECTIVE_ARGUMENTS)
        ):
            return self._stock(*args, **kwargs)
        self._rendezvous.require_every_rank("save_pretrained")
        state = self._state()
        return run_on_files(lambda: self._save_on_rank_0(state, arguments, args, kwargs))

    def _save_on_rank_0(
        self, state: dict[str, torch.Tensor], arguments: dict[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Save on rank 0, and return its result; None on other ranks."""
        if state:
            return self._stock(*args, **{**kwargs, "state_dict": state})
        if arguments.get("is_main_process"):
            raise CheckpointError(
                "`save_pretrained(is_main_process=True)` was called on a rank without the model: the model is gathered "
                "on rank 0. Pass `is_main_process=accelerator.is_main_process`, and copy the files to other nodes."
            )
        return None

    def _state(self) -> dict[str, torch.Tensor]:
        """Return the module's full state dict on rank 0, empty on other ranks. Collective."""
        state = self._sharded.full_state_dict()
        start = len(self._prefix)
        return {name[start:]: value for name, value in state.items() if name.startswith(self._prefix)}
