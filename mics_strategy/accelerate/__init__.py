"""Lets ``accelerate launch --config_file mics.yaml``, `Accelerator` and `transformers.Trainer` train sharded models.

Scripts do not import it: the processes that the launcher starts with such a file do, as soon as they import Accelerate
(`mics_strategy_autoload`). Where neither the launcher's configuration (``fsdp_version: mics``) nor a `MiCSPlugin` asks
for it, nothing changes.
"""

from mics_strategy.accelerate.accelerator import MiCSAccelerator
from mics_strategy.accelerate.install import install
from mics_strategy.accelerate.plugin import MiCSPlugin

__all__ = ["MiCSAccelerator", "MiCSPlugin"]

install()
