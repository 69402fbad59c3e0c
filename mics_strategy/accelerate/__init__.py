"""Lets ``accelerate launch --config_file mics.yaml``, `Accelerator` and `transformers.Trainer` train sharded models.

Importing this module is the one line that a script adds::

    import mics_strategy.accelerate

Where neither the launcher's configuration (``fsdp_version: mics``) nor a `MiCSPlugin` asks for it, nothing changes.
"""

from mics_strategy.accelerate.accelerator import MiCSAccelerator
from mics_strategy.accelerate.install import install
from mics_strategy.accelerate.plugin import MiCSPlugin

__all__ = ["MiCSAccelerator", "MiCSPlugin"]

install()
