"""What if a script calls `save_pretrained` on every rank, as Accelerate's documentation has it?

``model.save_pretrained(folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save)`` writes on
the main process only, and is called by all. Here all gather, and the main process writes the whole model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mics_strategy import CheckpointError, Sharded
from mics_strategy.accelerate.rendezvous import Rendezvous, run_on_all_ranks

_OF_ALL_RANKS = ("is_main_process", "save_function")  # given where all ranks call


def patch_save_pretrained(sharded: Sharded, meeting: Rendezvous) -> None:
    """Let `save_pretrained` of a model's modules gather what it writes, where all ranks call it. Idempotent.

    Args:
        sharded: The handle of the model.
        meeting: Rendezvous of all ranks with a timeout, so that a rank that calls alone does not wait forever.
    """
    for name, module in sharded.model.named_modules():
        guarded = vars(module).get("save_pretrained")
        if guarded is not None and not isinstance(guarded, _FullSave):
            object.__setattr__(module, "save_pretrained", _FullSave(guarded, module, name, sharded, meeting))


class _FullSave:
    """Stands in for ``save_pretrained`` of one module of a prepared model."""

    def __init__(
        self, guarded: Callable[..., Any], module: nn.Module, name: str, sharded: Sharded, meeting: Rendezvous
    ) -> None:
        self._guarded = guarded
        self._prefix = f"{name}." if name else ""
        self._sharded = sharded
        self._meeting = meeting
        self.__signature__ = inspect.signature(guarded)
        self._takes_state = "state_dict" in self.__signature__.parameters or hasattr(module, "peft_config")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Save the whole module, if all ranks are to call; else what `state_dict=` holds.

        Raises:
            CheckpointError: On every rank; one did not call, or could not write.
            LifecycleError: A rank calls alone, without `state_dict`.
        """
        bound = self.__signature__.bind_partial(*args, **kwargs).arguments
        given = {**bound, **bound.get("kwargs", {})}
        if given.get("state_dict") is not None or not (self._takes_state and any(n in given for n in _OF_ALL_RANKS)):
            return self._guarded(*args, **kwargs)
        self._meeting.require_every_rank("save_pretrained")
        state = self._state()
        return run_on_all_ranks(lambda: self._written(state, given, args, kwargs))

    def _written(self, state: dict[str, torch.Tensor], given: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """What `save_pretrained` returns on rank 0; None on others, which write nothing."""
        if state:
            return self._guarded(*args, **{**kwargs, "state_dict": state})
        if given.get("is_main_process"):
            raise CheckpointError(
                "`save_pretrained(is_main_process=True)` on a rank that does not have the model: it is gathered on "
                "rank 0. Pass `is_main_process=accelerator.is_main_process`, and copy what was written to other nodes."
            )
        return None

    def _state(self) -> dict[str, torch.Tensor]:
        """The module's whole state dict on rank 0, empty on the others. Collective."""
        whole = self._sharded.full_state_dict()
        start = len(self._prefix)
        return {name[start:]: value for name, value in whole.items() if name.startswith(self._prefix)}
