"""Are all ranks here to save, when one was interrupted?

Collecting a checkpoint is collective. After an exception on one rank the others are still in the middle of a step,
and a callback that saves now would wait for them until the process group's timeout. So the ranks first meet in the
key-value store of the process group, which no unfinished collective occupies.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mics_strategy import CheckpointError

PATIENCE = timedelta(seconds=30)


def require_every_rank(occasion: int, timeout: timedelta) -> None:
    """Return when all ranks have called this for the same `occasion`.

    Args:
        occasion: Counts the calls of a run, from 0.
        timeout: How long to wait, at most `PATIENCE`.

    Raises:
        CheckpointError: Some rank did not come.
    """
    if dist.get_world_size() == 1:
        return
    store = _get_default_store()
    keys = [f"mics_strategy/interrupted/{occasion}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "")
    try:
        store.wait(keys, min(timeout, PATIENCE))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise CheckpointError(
            f"A checkpoint was asked for after an exception, but ranks {missing} did not reach it: the exception came "
            "on some ranks only. Nothing was saved. Save regularly, with ModelCheckpoint(every_n_train_steps=...), to "
            "lose less."
        ) from error
