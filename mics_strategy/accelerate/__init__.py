"""Sharding for ``accelerate launch``, `Accelerator` and `transformers.Trainer`.

Scripts need not import this package: processes that ``accelerate launch --config_file mics.yaml`` starts import it as
soon as they import Accelerate (see `mics_strategy_autoload`). Without ``fsdp_version: mics`` in the launcher's
configuration and without a `MiCSPlugin`, nothing changes.
"""

from mics_strategy.accelerate.accelerator import MiCSAccelerator
from mics_strategy.accelerate.install import install
from mics_strategy.accelerate.plugin import MiCSPlugin

__all__ = ["MiCSAccelerator", "MiCSPlugin"]

install()
