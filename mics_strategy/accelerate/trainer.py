"""What does `transformers.Trainer` leave out for sharded models?

Its `save_model` writes nothing where checkpoints are written in shards. Here it writes the model as `from_pretrained`
loads it, whatever kind of checkpoints is written; those that are made on the way stay in shards.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import StateDictType

from mics_strategy.accelerate.plugin import MiCSPlugin


def save_models_whole() -> None:
    """Let `Trainer.save_model` write whole models, where the Trainer has been imported. Idempotent."""
    cls = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if cls is None or hasattr(cls.save_model, "mics_stock"):
        return
    stock = cls.save_model

    @functools.wraps(stock)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        is_checkpoint = _internal_call and output_dir is not None
        if not isinstance(plugin, MiCSPlugin) or is_checkpoint:
            stock(self, output_dir, _internal_call)
            return
        with _whole(plugin):
            stock(self, output_dir, _internal_call)

    save_model.mics_stock = stock  # type: ignore[attr-defined]
    cls.save_model = save_model


@contextmanager
def _whole(plugin: MiCSPlugin) -> Iterator[None]:
    before, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
    try:
        yield
    finally:
        plugin.state_dict_type = before
