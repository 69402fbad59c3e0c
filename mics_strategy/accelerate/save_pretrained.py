"""Collective `save_pretrained` of sharded models, as Accelerate documents it.

All ranks call ``model.save_pretrained(folder, is_main_process=accelerator.is_main_process,
save_function=accelerator.save)``; only the main process writes. Here all ranks gather the full model, and the main
process writes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mics_strategy import CheckpointError, Sharded
from mics_strategy.accelerate.rendezvous import Rendezvous, run_on_all_ranks

_COLLECTIVE_ARGUMENTS = ("is_main_process", "save_function")  # arguments of a call on all ranks


def patch_save_pretrained(sharded: Sharded, rendezvous: Rendezvous) -> None:
    """Make `save_pretrained` gather the model if all ranks call it. Idempotent.

    Args:
        sharded: Handle of the model.
        rendezvous: Rendezvous of all ranks with a timeout, so that a rank that calls alone does not wait forever.
    """
    for name, module in sharded.model.named_modules():
        stock = vars(module).get("save_pretrained")
        if stock is not None and not isinstance(stock, _FullSave):
            object.__setattr__(module, "save_pretrained", _FullSave(stock, module, name, sharded, rendezvous))


class _FullSave:
    """Replacement of ``save_pretrained`` of one module of a prepared model."""

    def __init__(
        self, stock: Callable[..., Any], module: nn.Module, name: str, sharded: Sharded, rendezvous: Rendezvous
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
        return run_on_all_ranks(lambda: self._save_on_rank_0(state, arguments, args, kwargs))

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
