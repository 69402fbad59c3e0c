"""Patches of `transformers.Trainer` and of TRL's Trainers for sharded models.

`save_model` of transformers writes nothing if checkpoints are sharded. Patched, it writes the model as
`from_pretrained` loads it, in every case; intermediate checkpoints remain sharded.

Unpatched, transformers loads weights in several files only into unsharded parameters. Patched, it loads them into
shards.

TRL shards models that are only evaluated, such as a reference, with torch's FSDP2 instead of the Accelerator. Patched,
the Accelerator shards them like the trained model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import StateDictType

from mics_strategy import load_weights
from mics_strategy.accelerate import framework
from mics_strategy.accelerate.plugin import MiCSPlugin
from mics_strategy.accelerate.prepare import sharded_of_model


def patch_trainers() -> None:
    """Patch the imported Trainers: full saves, loads, evaluation. Idempotent."""
    framework.patch_trl_prepare(_prepare_for_eval)
    module = sys.modules.get("transformers.trainer")
    if module is None or hasattr(module.Trainer.save_model, "mics_stock"):
        return
    module.Trainer.save_model = _save_full(module.Trainer.save_model)
    module.load_sharded_checkpoint = _load_into_shards(module.load_sharded_checkpoint)  # type: ignore[attr-defined]


def _prepare_for_eval(model: nn.Module, accelerator: Any) -> nn.Module:
    prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    return prepared.eval()


def _save_full(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        is_checkpoint = _internal_call and output_dir is not None
        if not isinstance(plugin, MiCSPlugin) or is_checkpoint:
            stock(self, output_dir, _internal_call)
            return
        with _with_full_state_dicts(plugin):
            stock(self, output_dir, _internal_call)

    save_model.mics_stock = stock  # type: ignore[attr-defined]
    return save_model


def _load_into_shards(stock: Callable[..., Any]) -> Callable[..., Any]:
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
