"""TensorBoard and Weights & Biases, for recipes that ask for them.

Lightning's loggers are used without its Trainer, so both loops have them.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from .errors import RecipeError

LoggerName = Literal["tensorboard", "wandb"]
_PACKAGES: Mapping[str, tuple[str, ...]] = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}
_WANDB_ID = "wandb_run_id"


def check_loggers(names: Sequence[LoggerName]) -> None:
    """Refuse loggers whose package is not installed.

    Raises:
        RecipeError: The package is missing.
    """
    for name in names:
        if not any(importlib.util.find_spec(package) for package in _PACKAGES[name]):
            raise RecipeError(
                f"`trainer.loggers` has {name}, but the package `{name}` is not installed. Run `pip install {name}` on "
                f"every machine, or use `--trainer.loggers=[]`: metrics.csv and metrics.jsonl are always written."
            )


class Loggers:
    """The loggers of one run. Use it on the first rank only.

    Args:
        names: Loggers to use.
        folder: Output folder of the run.
        run_name: Name of the run.
        settings: Resolved recipe, kept by loggers that show settings.
    """

    def __init__(self, names: Sequence[LoggerName], folder: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        self.names = names
        self.folder = folder
        self.run_name = run_name
        self.settings = settings
        self._open: list[Any] = []

    def begin(self, start_step: int) -> None:
        """Start, or continue a run that has taken `start_step` optimizer steps."""
        builders = {"tensorboard": self._tensorboard, "wandb": self._wandb}
        self._open = [builders[name](start_step) for name in self.names]

    def log(self, row: Mapping[str, float]) -> None:
        """Log a row of metrics at its step."""
        values = {name: value for name, value in row.items() if name != "step"}
        for logger in self._open:
            logger.log_metrics(values, int(row["step"]))

    def end(self, status: Literal["success", "failed"]) -> None:
        """Write what is buffered and end the run of each logger."""
        for logger in self._open:
            logger.finalize(status)
        self._open = []

    def _tensorboard(self, start_step: int) -> Any:
        """Open TensorBoard's files, which hide events of the steps that are taken again."""
        from lightning.pytorch.loggers import TensorBoardLogger

        first = start_step + 1 if start_step else 0
        return TensorBoardLogger(self.folder, name="tensorboard", version="", purge_step=first)

    def _wandb(self, start_step: int) -> Any:
        """Open a run of Weights & Biases, or the earlier one that is continued."""
        from lightning.pytorch.loggers import WandbLogger

        file = self.folder / _WANDB_ID
        run_id = file.read_text().strip() if start_step and file.is_file() else uuid4().hex
        file.write_text(f"{run_id}\n")
        logger = WandbLogger(
            name=self.run_name,
            save_dir=self.folder,
            project=os.environ.get("WANDB_PROJECT", "mics_strategy"),
            id=run_id,
            resume="allow",
        )
        logger.log_hyperparams(dict(self.settings))
        return logger
