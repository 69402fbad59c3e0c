"""What a sharded parameter knows of the engine that gathers it and reduces its gradient."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from mics_strategy.engine.bucket import Bucket
    from mics_strategy.engine.grad_bucket import GradBucket
    from mics_strategy.engine.step import Engine


class EngineLink:
    """The owner of the parameters of one bucket; weakly, as `hooks` explains.

    Args:
        engine: Of the model.
        bucket: Of the parameters.
        gradient: Of the bucket; None where it is frozen.
    """

    def __init__(self, engine: Engine, bucket: Bucket, gradient: GradBucket | None) -> None:
        self._engine = weakref.ref(engine)
        self._bucket = weakref.ref(bucket)
        self._gradient = None if gradient is None else weakref.ref(gradient)

    def finish_gradients(self) -> None:
        """See `GradientOwner`."""
        engine = self._engine()
        if engine is not None:
            engine.finish_gradients()

    def clear_gradient(self, position: int) -> None:
        """See `GradientOwner`."""
        engine, gradient = self._engine(), None if self._gradient is None else self._gradient()
        if engine is not None and gradient is not None:
            engine.reducer.clear(gradient, position)

    def unsharded(self, position: int) -> nn.Parameter | None:
        """See `GradientOwner`."""
        bucket = self._bucket()
        return None if bucket is None else bucket.unsharded_params[position]

    def belongs_to(self, engine: Engine) -> bool:
        """Whether it is that engine's."""
        return self._engine() is engine
